"""What `mopd check` says of memory and time: the estimates of mopd/memory.py and mopd/step_time.py as JSON values and as a
table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mopd.config_placement import shared_devices
from mopd.memory import GIB, device_memory, estimate, table_of, warnings_of
from mopd.model_shape import UnknownShape, shape_of
from mopd.step_time import seconds_of, work_of


def estimate_record(config: Any) -> dict[str, Any]:
    """{"ranks", "parameters", "device" and "host" {part: GiB}, "parts" [[part, words, GiB]], "phases" {phase: GiB}, "peak",
    "peak_phase", "have" (GiB of a device, or None), "have_source", "warnings", "notes", "work" {…}, "seconds" {phase: s}};
    {"unknown": why} where a model's config.json is not at hand."""
    try:
        shape = shape_of(config.student.model, trust_remote_code=config.student.trust_remote_code,
                         freeze_router=config.student.freeze_router)
        found, work = estimate(config, shape), work_of(config, shape)
    except (UnknownShape, OSError, ValueError, AttributeError, ImportError) as error:
        return {"unknown": f"memory and time are not estimated: {error}"}
    have, source = device_memory(config)
    given = config.deepspeed
    return {
        "ranks": found.ranks, "parameters": shape.parameters, "active": shape.active + shape.head,
        "setting": {"zero_stage": given.zero_stage, "dtype": given.dtype, "autoep_size": given.autoep_size,
                    "sequence_parallel_size": given.sequence_parallel_size,
                    "gradient_checkpointing": given.gradient_checkpointing, "offload_optimizer": given.offload_optimizer,
                    "offload_parameters": given.offload_parameters, "micro_batch_tokens": config.train.micro_batch_tokens},
        "device": {part: size / GIB for part, size in found.device.items() if size},
        "host": {part: size / GIB for part, size in found.host.items() if size},
        "parts": [list(row) for row in table_of(found)],
        "phases": {phase: size / GIB for phase, size in found.phases.items()}, "peak": found.peak / GIB,
        "peak_phase": found.peak_phase, "have": None if have is None else have / GIB, "have_source": source,
        "warnings": warnings_of(found, config) + shared_devices(config.placement), "notes": list(found.notes),
        "work": {"tokens": work.rows, "loss_tokens": work.loss, "sampled_tokens": work.sampled,
                 "petaflops": {"training": work.training / 1e15, "scoring": work.scoring / 1e15,
                               "sampling": (work.prefill + work.decode) / 1e15}},
        "seconds": seconds_of(config, work)}


def print_estimate(record: dict[str, Any], console: Console, *, markdown: bool = False) -> None:
    """A table of the parts and the phases, and a line on time."""
    if "unknown" in record:
        console.print(escape(record["unknown"]), soft_wrap=True)
        return
    setting = record["setting"]
    how = [f"ZeRO-{setting['zero_stage']}", setting["dtype"]]
    how += [f"experts over {setting['autoep_size']}"] * bool(setting["autoep_size"])
    how += [f"columns over {setting['sequence_parallel_size']}"] * (setting["sequence_parallel_size"] > 1)
    how += ["checkpointing"] * setting["gradient_checkpointing"] + ["optimizer offloaded"] * setting["offload_optimizer"]
    how += ["weights offloaded"] * setting["offload_parameters"]
    title = (f"memory of one of {record['ranks']} rank(s), about ({record['parameters'] / 1e9:.3g} B parameters, "
             f"{record['active'] / 1e9:.3g} B active; {', '.join(how)})")
    rows = [(words, f"{size:.2f}") for _, words, size in record["parts"]]
    rows += [(f"in all while {'the weights are updated' if phase == 'update' else phase}", f"{size:.2f}")
             for phase, size in record["phases"].items()]
    rows += [(f"in the host's memory: {part}", f"{size:.2f}") for part, size in record["host"].items()]
    if markdown:
        console.print(f"{title}\n\n| part | GiB |\n| --- | --- |\n" + "\n".join(f"| {a} | {b} |" for a, b in rows),
                      soft_wrap=True, markup=False)
    else:
        table = Table(title=title, title_justify="left")
        table.add_column("part")
        table.add_column("GiB", justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(_of_time(record), soft_wrap=True, markup=False)
    for note in record["notes"]:
        console.print(escape(note), soft_wrap=True)
    for warning in record["warnings"]:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}", soft_wrap=True)


def _of_time(record: dict[str, Any]) -> str:
    work = record["work"]
    flops = ", ".join(f"{name} {amount:.3g}" for name, amount in work["petaflops"].items() if amount)
    said = (f"A step has at most {work['tokens']:,.0f} tokens, {work['loss_tokens']:,.0f} with loss, "
            f"{work['sampled_tokens']:,.0f} sampled: {flops} PFLOP")
    if not record["seconds"]:
        return said + " (placement.device_tflops gives seconds)."
    return said + "; " + ", ".join(f"{phase} {seconds:.3g} s" for phase, seconds in record["seconds"].items()) + "."
