"""Which engine a sequence goes to: admission by predicted KV need, placement where most more of its kind would fit.

Bookkeeping of slots and tokens only; owns no engine. Source: MiMo-V2.6 technical report, section 6 (predictive dispatch).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Dispatch:
    """Engines by name with their free slots (sequences) and free KV memory (tokens).

    A running sequence holds one slot and its predicted need. It is admitted only where `safety` ≥ 1 times that need is
    still free: predictions are means, and a sequence that outgrows its own must not push out others. A need so large that
    `safety` times it fits no engine at all asks for a whole engine instead, so that it does not wait for ever.
    """

    def __init__(self, safety: float = 1.5):
        if not safety >= 1.0:
            raise ValueError(f"the KV safety multiple must be at least 1, got {safety}")
        self.safety = safety
        self.slots: dict[str, int] = {}
        self.kv: dict[str, float] = {}
        self.free_slots: dict[str, int] = {}
        self.free_kv: dict[str, float] = {}
        self._running: dict[str, tuple[str, float]] = {}
        self.total_free = 0

    @property
    def total_slots(self) -> int:
        return sum(self.slots.values())

    def set_engine(self, name: str, slots: int, kv: float) -> None:
        """Engine `name` has `slots` > 0 slots and `kv` > 0 tokens of KV memory from now on, whatever runs there."""
        if slots < 1 or not kv > 0:
            raise ValueError(f"engine {name!r} needs at least 1 slot and some KV memory, got {slots} and {kv}")
        held = [need for engine, need in self._running.values() if engine == name]
        self.total_free += slots - len(held) - self.free_slots.get(name, 0)
        self.slots[name], self.kv[name] = slots, kv
        self.free_slots[name], self.free_kv[name] = slots - len(held), kv - sum(held)

    def remove_engine(self, name: str) -> list[str]:
        """Forget engine `name`; returns the keys of the sequences that ran there, in the order in which they came."""
        lost = [key for key, (engine, _) in self._running.items() if engine == name]
        for key in lost:
            del self._running[key]
        self.total_free -= self.free_slots.pop(name, 0)
        for table in (self.slots, self.kv, self.free_kv):
            table.pop(name, None)
        return lost

    def place(self, key: str, need: float) -> str | None:
        """Admit sequence `key` with a predicted `need` > 0 of KV tokens: the engine's name, or None if it fits nowhere now.

        It goes where min(free slots, free KV / need) is largest, the number of such sequences that would still fit; of
        equals to the first.
        """
        if not self.kv:
            return None
        largest = max(self.kv.values())
        asked, held = min(self.safety * need, largest), min(need, largest)
        best, room = None, 0.0
        for name, slots in self.free_slots.items():
            free = self.free_kv[name]
            if slots < 1 or free < asked - 1e-6:
                continue
            fits = min(float(slots), free / need)
            if fits > room:
                best, room = name, fits
        if best is not None:
            self._running[key] = (best, held)
            self.free_slots[best] -= 1
            self.free_kv[best] -= held
            self.total_free -= 1
        return best

    def release(self, key: str) -> str:
        """Sequence `key` has left its engine; returns the engine's name. Raises ValueError if it was on none."""
        if key not in self._running:
            raise ValueError(f"sequence {key} is on no engine")
        name, held = self._running.pop(key)
        self.free_slots[name] += 1
        self.free_kv[name] += held
        self.total_free += 1
        return name

    def clear(self) -> None:
        """Forget every engine and what ran there: a new start."""
        for table in (self.slots, self.kv, self.free_slots, self.free_kv, self._running):
            table.clear()
        self.total_free = 0

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"engines": [[n, self.slots[n], self.kv[n], self.free_kv[n]] for n in self.slots],
                "running": [[key, engine, need] for key, (engine, need) in self._running.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clear()
        self._running = {key: (engine, need) for key, engine, need in state["running"]}
        for name, slots, kv, free in state["engines"]:
            self.set_engine(name, int(slots), kv)
            self.free_kv[name] = free  # as it was to the last bit, whatever the order of the additions
