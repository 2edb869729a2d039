"""Names of the log in words and colours, shared by all outputs of the report."""

from __future__ import annotations

TIERS = ("HBM", "HOST", "NVME")
TIER_LABELS = {"HBM": "HBM", "HOST": "HOST (page-locked)", "NVME": "NVMe"}
COPY_LANES = ("h2d", "d2h", "d2d", "gather", "reduce", "read", "write")
LANES = (*COPY_LANES, "update")
LANE_LABELS = {
    "h2d": "H2D",
    "d2h": "D2H",
    "d2d": "D2D",
    "gather": "gather",
    "reduce": "reduce",
    "read": "disk read",
    "write": "disk write",
    "update": "update",
}
UNATTRIBUTED = "unattributed"
CATEGORIES = (
    "param",
    "grad",
    "master",
    "state",
    "activation",
    "activation reserved",
    "buffer",
    "pool",
)
"""In stacking order; others follow, and `UNATTRIBUTED` is last."""

CATEGORY_NOTES = {
    "param": "parameters",
    "grad": "gradients",
    "master": "fp32 masters",
    "state": "states of the optimizer",
    "activation": "what graphs were counted to hold",
    "activation reserved": "reserved for activations and for computing, beyond what is held",
    "buffer": "buffers of the model",
    "other": "counted, and of none of these",
    "pool": "memory through which disk traffic goes",
    UNATTRIBUTED: "charged without a purpose",
}
DEMAND = {
    "F": "miss in forward",
    "B": "miss in backward",
    "E": "miss in evaluation",
    "fault": "touched outside its unit",
    "saved": "needed by a saved tensor",
    "gathered": "gathered by the caller",
}
"""Reasons to fetch a bucket that an access already needs."""
REASONS = {
    **DEMAND,
    "plan": "prefetched by the plan",
    "before": "there when recording began",
    "evict": "evicted: clean, and the room was needed",
    "discard": "discarded: an update made it stale",
    "fail": "its fetch failed",
    "end": "still there when recording ended",
    "gradient": "a gradient goes home",
    "addend": "a gradient of some rank comes up, to be summed on HBM",
    "activations": "activations make room, or come back",
    "step": "an update",
    "": "not said",
}
WITHOUT_WHY = {"read": "a home on disk is needed", "write": "a home goes back to disk"}
"""Why lanes move that have one reason alone."""
SHORT_PARTS = {
    "compute": "compute",
    "wait_h2d": "wait H2D",
    "wait_d2h": "wait D2H",
    "wait_d2d": "wait D2D",
    "wait_read": "wait disk read",
    "wait_write": "wait disk write",
    "wait_update": "wait update",
    "wait_gather": "wait gather",
    "wait_ranks": "wait ranks",
    "rest_forward": "rest of forward",
    "rest_backward": "rest of backward",
    "step": "optimizer step",
    "between": "between",
}
PART_NOTES = {
    "compute_forward": "units compute in forward",
    "compute_backward": "units compute in backward",
    "wait_h2d": "stands still for a copy from HOST to HBM",
    "wait_d2h": "stands still for a copy from HBM to HOST",
    "wait_d2d": "stands still for a copy within HBM",
    "wait_read": "stands still for a read from disk",
    "wait_write": "stands still for a write to disk",
    "wait_update": "stands still for an update of the optimizer",
    "wait_gather": "stands still for shares of weights that other ranks keep",
    "wait_ranks": "stands still for other ranks: their updates, gradients, the roll call of a step",
    "rest_forward": "inside forward, in no unit: loss, glue, launching",
    "rest_backward": "inside backward, in no unit: loss, gradients on their way, glue",
    "step": "inside optimizer.step(), without its waits",
    "between": "outside forward, backward and step: data, logging, zero_grad",
}

WAITED_FOR = {
    "wait_h2d": "copies up to HBM",
    "wait_d2h": "copies down to HOST",
    "wait_d2d": "copies within HBM",
    "wait_read": "reads from disk",
    "wait_write": "writes to disk",
    "wait_update": "updates of the optimizer",
    "wait_gather": "shares of weights that other ranks keep",
    "wait_ranks": "other ranks",
}

LIGHT = {"HBM": "#0072b2", "HOST": "#d55e00", "NVME": "#009e73"}
"""Okabe and Ito's colours, distinct for people with any kind of colour vision."""
TERMINAL = {"HBM": "blue", "HOST": "dark_orange", "NVME": "green"}
RAMPS = {
    "HBM": ("#0b4f8a", "#0072b2", "#56b4e9", "#b3d9f2"),
    "HOST": ("#963c00", "#d55e00", "#f29e4c", "#fbd9b0"),
    "NVME": ("#006048", "#009e73", "#5cc9a7", "#bfe8da"),
}
"""From dark to light: the shades of a tier's categories."""
PART_COLOURS = {
    "compute": "#4d4d4d",
    "wait_h2d": "#0072b2",
    "wait_d2h": "#56b4e9",
    "wait_d2d": "#b3d9f2",
    "wait_read": "#009e73",
    "wait_write": "#5cc9a7",
    "wait_update": "#d55e00",
    "wait_gather": "#f0e442",
    "wait_ranks": "#e69f00",
    "rest": "#999999",
    "step": "#cc79a7",
    "between": "#bdbdbd",
}


def tier_label(tier: str, mode: str) -> str:
    """Return the name of a tier for people; RAM is page-locked only if hetero manages it."""
    return "RAM" if (tier, mode) == ("HOST", "plain") else TIER_LABELS.get(tier, tier)


def part_label(part: str) -> str:
    """Return the name of a part of a step for people: ``wait_h2d -> 'wait H2D'``."""
    if part.startswith("compute_"):
        return f"compute, {part.removeprefix('compute_')}"
    return SHORT_PARTS.get(part, part.replace("_", " "))


def part_colour(part: str) -> str:
    return PART_COLOURS.get(part) or PART_COLOURS.get(part.split("_")[0], "#cc79a7")


def shades(tier: str, count: int) -> list[str]:
    """Return ``count`` colours of a tier, from dark to light, evenly apart."""
    ramp = RAMPS.get(tier, RAMPS["HBM"])
    stops = [_rgb(colour) for colour in (ramp if count > 3 else ramp[1:])]
    places = [i * (len(stops) - 1) / max(1, count - 1) for i in range(count)]
    return (
        [_mixed(stops, place) for place in places]
        if count > 1
        else [LIGHT.get(tier, LIGHT["HBM"])][:count]
    )


def is_light(colour: str) -> bool:
    """Whether dark text reads better on a colour than white text (WCAG 2 luminance)."""
    linear = (((v / 255 + 0.055) / 1.055) ** 2.4 if v > 10 else v / 3294.6 for v in _rgb(colour))
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _mixed(stops: list[tuple[int, ...]], place: float) -> str:
    low = min(int(place), len(stops) - 2)
    near, far, share = stops[low], stops[low + 1], place - low
    mixed = (round(a + (b - a) * share) for a, b in zip(near, far, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def format_seconds(seconds: float) -> str:
    """Return a time for people: ``0.0123 -> '12.3 ms'``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{three(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"


def three(value: float) -> str:
    """Return a number with three significant digits, without an exponent above one."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def format_count(count: int) -> str:
    """Return a number in short form: ``8.03 B``, ``32 M``, ``8,320``."""
    for size, letter in ((10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:,}"


def format_rate(bytes_per_second: float) -> str:
    """Return a rate for people, in the decimal units of links and drives."""
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_second >= scale:
            return f"{three(bytes_per_second / scale)} {unit}"
    return f"{three(bytes_per_second)} B/s"


def format_share(share: float) -> str:
    """Return a fraction in per cent: ``0.217 -> '22 %'``."""
    return f"{share * 100:.0f} %" if share >= 0.1 or not share else f"{share * 100:.1f} %"
