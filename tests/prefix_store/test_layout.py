"""Another program reads a store: zarr, numpy and json alone, by what docs/prefix_store.md says of the layout on disk."""

import hashlib
import json

import numpy as np
import zarr

from prefix_store import PrefixStore
from prefix_store.trajectory import content_hash, example_sequence, prefix_of


def as_json(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


class Reader:
    """One store segment's group."""

    def __init__(self, group):
        self.group, about = group, group.attrs["prefix_store"]
        self.columns, self.codes, self.extras = about["columns"], about["codes"], about["extras"]
        self.arrays = {name: array[:] for name, array in group.arrays()}
        for name in (f"extras/{e['folder']}/{part}" for e in self.extras for part in ("offsets", "values")):
            self.arrays[name] = group[name][:]

    def row(self, table, number):
        return dict(zip(self.columns[table], self.arrays[table][number].tolist(), strict=True))

    def own(self, context, stop):
        """The rows of a context's own tokens among its first `stop`."""
        return slice(context["token_start"], context["token_start"] + max(stop - context["fork"], 0))

    def values(self, name, start, number, stop):
        context = self.row("contexts", start + number)
        own = self.arrays[name][self.own(context, stop)]
        if not context["fork"]:
            return own
        return np.concatenate([self.values(name, start, context["parent"], min(stop, context["fork"])), own])

    def extra(self, folder, start, number, stop):
        context = self.row("contexts", start + number)
        rows = self.own(context, stop)
        offsets = self.arrays[f"extras/{folder}/offsets"][rows.start : rows.stop + 1]
        own = np.diff(offsets), self.arrays[f"extras/{folder}/values"][offsets[0] : offsets[-1]]
        if not context["fork"]:
            return own
        before = self.extra(folder, start, context["parent"], min(stop, context["fork"]))
        return tuple(np.concatenate(both) for both in zip(before, own, strict=True))

    def sequence_hash(self, number):
        sequence = self.row("sequences", number)
        record = self.arrays["records"][sequence["record_start"] : sequence["record_end"]].tobytes()
        start, table, tail = sequence["context_start"], [], []
        for k in range(sequence["context_count"]):
            context, rows = self.row("contexts", start + k), []
            for at in range(context["segment_start"], context["segment_start"] + context["segment_count"]):
                s = self.row("segments", at)
                kind, writer = self.codes["kind"][s["kind"]], self.codes["writer"][s["writer"]]
                rows.append([kind, s["start"], s["end"], s["turn"], writer])
            table.append([None if context["parent"] < 0 else context["parent"], context["fork"], context["length"], rows])
            for name in ("tokens", "behaviour_logprob", "weights_version"):
                values = self.values(name, start, k, context["length"])
                if name == "behaviour_logprob":
                    values.view("<u4")[np.isnan(values)] = 0x7FC00000
                tail.append(values.tobytes())
            for name, kind in sorted(json.loads(record).get("extras", {}).items()):
                (folder,) = (e["folder"] for e in self.extras if [e["name"], e["dtype"], e["tail"]] == [name, *kind])
                counts, values = self.extra(folder, start, k, context["length"])
                tail += [counts.astype("<i4").tobytes(), values.tobytes()]
        digest = hashlib.sha256()
        for part in (record, json.dumps(table, separators=(",", ":")).encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
        for part in tail:
            digest.update(part)
        return digest.hexdigest()


def test_the_layout_is_what_the_document_says(tmp_path):
    given = {}
    with PrefixStore.open(tmp_path / "store", "a") as store:
        for seed in range(8):
            sequence = example_sequence(seed, extras=seed % 2 == 0, fork=None if seed % 3 else True, turns=2 + seed % 4)
            given[store.append(sequence)] = sequence
            if seed % 4 == 3:
                store.commit()
    top = zarr.open_group(tmp_path / "store", mode="r")
    assert top.attrs["prefix_store"]["layout"] == 1
    versions = sorted((tmp_path / "store" / "versions").iterdir())
    manifest = json.loads(versions[-1].read_bytes())
    digest = manifest.pop("sha256")
    assert hashlib.sha256(as_json(manifest)).hexdigest() == digest and manifest["number"] == len(versions) == 2
    found = 0
    for entry in manifest["segments"]:
        folder = tmp_path / "store" / "segments" / entry["name"]
        assert hashlib.sha256((folder / "zarr.json").read_bytes()).hexdigest()[:32] == entry["name"]
        reader = Reader(top[f"segments/{entry['name']}"])
        hashes = reader.group.attrs["prefix_store"]["sha256"]
        files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        del files["zarr.json"]
        assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == hashes
        for number, identity in enumerate(reader.arrays["ids"]):
            sequence, original = reader.row("sequences", number), given[identity.tobytes().hex()]
            assert reader.sequence_hash(number) == identity.tobytes().hex() == content_hash(original)
            assert reader.codes["domain"][sequence["domain"]] == original.domain
            assert reader.codes["source"][sequence["source"]] == original.source.kind
            for turn in range(sequence["turns"]):
                point = reader.row("points", sequence["point_start"] + turn)
                assert (point["sequence"], point["turn"]) == (number, turn)
                prefix = reader.values("tokens", sequence["context_start"], point["context"], point["prefix_tokens"])
                assert np.array_equal(prefix, prefix_of(original, point["context"], turn))
                found += 1
    assert found == sum(sequence.turns for sequence in given.values())
