"""What the command says: lines before the run, one bar while it runs, a table at the end."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from featx.errors import counted
from featx.types import LayerSpec

PLAIN_INTERVAL_S = 10.0
"""Where stderr is no terminal: a line this often instead of a bar."""

_WAITING_SHARE = 0.2


def say(text: str = "") -> None:
    """A line of the command's result, on stdout; nobody has to read it to the end (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        stop_saying()


def stop_saying() -> None:
    """Write no more to stdout, whose reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_as_json = False
"""Whether stderr gets JSON objects instead of text."""


class _JsonFormatter(logging.Formatter):
    """Records of the libraries' loggers, in the form of our own lines."""

    def format(self, record: logging.LogRecord) -> str:
        return _json_line(record.levelname.lower(), message=record.getMessage())


def log_as_json() -> None:
    """From now on one JSON object a line on stderr, in place of text for people."""
    global _as_json
    _as_json = True
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_JsonFormatter())


def _json_line(level: str, **values: Any) -> str:
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    return json.dumps({"time": stamp, "level": level, **values})


def complain(text: str, level: str = "info") -> None:
    """Something about the run, on stderr.

    Args:
        level: 'info', 'warning' or 'error'; a text that begins with 'warning:' is one.
    """
    if _as_json:
        if not (text := text.strip()):
            return
        level = "warning" if text.startswith("warning: ") else level
        text = _json_line(level, message=text.removeprefix("warning: "))
    print(text, file=sys.stderr, flush=True)


def announce(rows: Sequence[tuple[str, str]]) -> None:
    """What is going to be done, before it begins."""
    if not _as_json:
        complain(f"{facts(rows)}\n")
        return
    values: dict[str, str] = {}
    last = ""
    for name, value in rows:
        last = name or last  # a line without a name goes on with the one before
        values[last] = f"{values[last]}\n{value}" if last in values else value
    print(_json_line("info", event="begin", **values), file=sys.stderr, flush=True)


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Aligned 'name  value' lines; further lines of a value are indented below it."""
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, value in rows:
        first, *more = value.splitlines() or [""]
        lines.append(f"{name:<{width}}  {first}".rstrip())
        lines += [f"{'':<{width}}  {line}" for line in more]
    return "\n".join(lines)


def size_text(num_bytes: float) -> str:
    """Bytes for people: '2.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def time_text(seconds: float) -> str:
    """Seconds for people: '41 s', '12 min', '3.5 h'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Progress:
    """Images per second, time left, failures, and which stage the others wait for."""

    def __init__(self, total: int, done: int) -> None:
        self._terminal = sys.stderr.isatty() and not _as_json
        self._total = total
        self._done = done
        self._begun = self._told = time.perf_counter()
        self._first = done
        self._failures = 0
        self._waiting = 0.0
        self._bar = tqdm(
            total=total, initial=done, unit="img", disable=not self._terminal, smoothing=0.1
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self) -> None:
        """Only now does the time count: until here nothing could be done."""
        self._begun = self._told = time.perf_counter()
        self._bar.unpause()

    def step(self, images: int, failures: int, waited_s: float) -> None:
        """One batch is done; waited_s of it the device stood waiting for images."""
        self._done += images
        self._failures += failures
        self._waiting += waited_s
        share = self._waiting / max(1e-9, time.perf_counter() - self._begun)
        stage = "reading images" if share > _WAITING_SHARE else "the model"
        if self._terminal:
            self._bar.set_postfix_str(f"{self._failures} failed, bound by {stage}", refresh=False)
            self._bar.update(images)
        elif time.perf_counter() - self._told > PLAIN_INTERVAL_S:
            self._told = time.perf_counter()
            rate = (self._done - self._first) / (self._told - self._begun)
            left = (self._total - self._done) / rate if rate else float("nan")
            if _as_json:
                line = _json_line(
                    "info",
                    event="progress",
                    done=self._done,
                    total=self._total,
                    failures=self._failures,
                    images_per_second=round(rate, 3),
                    bound_by=stage,
                )
                print(line, file=sys.stderr, flush=True)
                return
            complain(
                f"{self._done} of {self._total} images, {rate:.1f} images/s, {time_text(left)} "
                f"left, {self._failures} failed, bound by {stage}"
            )

    def tell(self, text: str) -> None:
        """A line about the run, above the bar."""
        if self._terminal:
            tqdm.write(text, file=sys.stderr)
        else:
            complain(text)


class Unseen:
    """What a worker has instead of a bar: nothing is shown, the waits are summed."""

    def __init__(self) -> None:
        self._waited_s = 0.0

    def __enter__(self) -> Unseen:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def step(self, images: int, failures: int, waited_s: float) -> None:
        """As that of Progress."""
        self._waited_s += waited_s

    def take_waited(self) -> float:
        """Seconds waited since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


class CountProgress:
    """How much of something is done, its speed and the time left.

    Args:
        unit: what is counted: "B" for bytes, else a plural, such as "rows".
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._total = self._done = 0
        self._begun = self._told = time.perf_counter()
        self._bar = tqdm(
            unit=unit,
            unit_scale=unit == "B",
            unit_divisor=1024,
            disable=not sys.stderr.isatty() or _as_json,
        )

    def __enter__(self) -> CountProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, total: int) -> None:
        """So much will be done, about."""
        self._total = total
        self._bar.reset(total)

    def step(self, count: int) -> None:
        """So much more is done."""
        self._done += count
        self._bar.update(count)
        now = time.perf_counter()
        if self._bar.disable and now - self._told > PLAIN_INTERVAL_S:
            self._told = now
            rate = self._done / (now - self._begun)
            left = time_text(max(0, self._total - self._done) / rate)
            done, total, speed = map(self._text, (self._done, self._total, rate))
            complain(f"{done} of {total}, {speed}/s, {left} left")

    def _text(self, count: float) -> str:
        return size_text(count) if self._unit == "B" else f"{count:.0f} {self._unit}"


def describe_run(prepared: Any) -> list[tuple[str, str]]:
    """What will be done, before it is done."""
    config, listing, header = prepared.config, prepared.listing, prepared.header
    classes = f", {len(listing.classes)} classes" if listing.classes else ", no labels"
    data = f"{config.data.root or config.data.name}: {counted(len(listing), 'image')}{classes}"
    if listing.skipped:
        skipped = ", ".join(f"{n} {why}" for why, n in sorted(listing.skipped.items()))
        data += f"\nleft out: {skipped}"
    compute = prepared.engine.compute
    devices = Counter(map(str, prepared.devices))
    settings = {
        **prepared.engine.backbone.choices,
        "precision": compute.precision,
        "compile": str(compute.compile).lower(),
        "fold": str(compute.fold).lower(),
        "batch_size": str(compute.batch_size),
        "part_rows": str(prepared.part_rows),
        **({} if prepared.at_once.threads is None else {"threads": str(prepared.at_once.threads)}),
        **({"streams": str(prepared.at_once.replicas)} if "streams" in prepared.choices else {}),
    }
    rows = [
        ("data", data),
        ("model", f"{header.model}, weights {header.weights}"),
        ("", f"sha256 {header.weights_sha256}"),
        ("transform", f"{header.transform}, decode={config.decode}"),
        ("layers", layers_text(prepared)),
        ("device", ", ".join(f"{n} x {d}" if n > 1 else d for d, n in devices.items())),
        *((name, prepared.choices.get(name, value)) for name, value in settings.items()),
    ]
    if doubt := prepared.engine.why_cast_each_pass:
        rows.append(("weights", f"cast to {compute.precision} in each pass; cast once, {doubt}"))
    if plain := prepared.engine.unfused:
        shown = ", ".join(plain[:3]) + (", ..." if len(plain) > 3 else "")
        rows.append(("attention", f"fused attention is off for this run in {shown} ({len(plain)})"))
    if prepared.left_out:
        rows.append(("left out", "\n".join(prepared.left_out)))
    return rows


def layers_text(prepared: Any) -> str:
    """A line for each dataset: name, shape, dtype, bytes per row."""
    shown = prepared.specs[:20]
    lines = [
        f"{spec.name}  {spec.shape}  {spec.dtype}  {size_text(spec.row_bytes)} a row"
        + (f"  ({_origin(spec)})" if spec.name != spec.layer else "")
        for spec in shown
    ]
    if len(prepared.specs) > len(shown):
        lines.append(f"... and {len(prepared.specs) - len(shown)} more")
    return "\n".join(lines)


def _origin(spec: LayerSpec) -> str:
    """What of which layer; what job=attribute takes at the input is of none."""
    return f"{spec.capture} of {spec.layer}" if spec.layer else spec.capture


def bottleneck(
    seconds: Mapping[str, float], took: float, threads: int, device: str, precision: str
) -> str:
    """The stage that the others waited for, its share of the time, and what would move it.

    Args:
        seconds: stage -> busy seconds; reading and decoding of all threads together.
        took: seconds of the run, from its first batch to its last commit.
        threads: that read and decode.
        device: 'cpu', 'cuda', 'mps'.
        precision: as the config has it; auto has tried the others.
    """
    waited = seconds["wait"] / took
    if waited > _WAITING_SHARE:
        stage = max(("read", "decode"), key=lambda stage: seconds[stage])
        gpu = ", or decode=gpu" if device == "cuda" and "decode_on_device" not in seconds else ""
        busy = f"{seconds[stage] / took:.1f} of {threads} threads busy, {waited:.0%} of the time "
        return {
            "read": f"reading images: {busy}waited for; a faster disk or network would help",
            "decode": f"decoding: {busy}waited for; more CPU cores would help, and for JPEGs "
            'pip install "featx[jpeg]" where it is missing' + gpu,
        }[stage]
    known = ("model", "copy", "write", "statistics")
    stage = max((s for s in known if s in seconds), key=lambda stage: seconds[stage])
    model = "a GPU or an earlier layer" if device == "cpu" else "compile=true or an earlier layer"
    if precision == "fp32":
        model += ", or precision=auto,"
    text = {
        "model": f"the model: {{share:.0%}} of the time; {model} would help",
        "copy": "copying from the device: {share:.0%} of the time; a reduction moves less",
        "write": "writing: {share:.0%} of the time; a reduction leaves less to write",
        "statistics": "summing up: {share:.0%} of the time; a reduction or stats.kind=diagonal "
        "leaves less to sum",
    }[stage]
    return text.format(share=seconds[stage] / took)


def trial_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lines that compare a run with its trial; none where nothing was computed here."""
    promised, share = summary["trial_images_per_second"], summary["share_of_trial"]
    if not promised:
        return []
    text = f"reading, decoding and model promised {promised:.1f} images/s"
    text += "" if share is None else f"; the run reached {share:.2f} of it"
    slow = [("slow", summary["below_trial"])] if summary["below_trial"] else []
    return [("trial", text), *slow]


def describe_end(summary: Mapping[str, Any], out: str, using: str | None = None) -> str:
    """The table after the run, with lines that open the result.

    Args:
        summary: of the run.
        out: the store.
        using: lines that use `store`; None reads the features and labels of the first layer.
    """
    rate = summary["images_per_second"]
    warnings = summary["decoder_warnings"]
    rows = [
        ("rows", str(summary["rows"])),
        ("failures", str(summary["failures"])),
        *([("warnings", _warnings_text(warnings))] if warnings else []),
        ("images/s", f"{rate:.1f}" if rate else "nothing was left to do"),
        *trial_rows(summary),
        ("seconds", seconds_text(summary["seconds"])),
        *([("bound by", summary["bottleneck"])] if summary["bottleneck"] else []),
        ("size", size_text(summary["bytes"])),
        ("memory", f"{summary['peak_memory_mib']} MiB at the peak"),
        ("store", out),
    ]
    layer = summary["layers"][0]
    if using is None:
        using = (
            f'X, y = store.xy("{layer}")      # ok rows only; store["{layer}"][10:20] reads lazily'
        )
    opening = f"import featx\nstore = featx.open({json.dumps(out, ensure_ascii=False)})\n{using}"
    return f"{facts(rows)}\n\n{opening}"


def seconds_text(seconds: Mapping[str, float | None]) -> str:
    """The busy seconds of the stages whose are known."""
    known = [f"{stage} {value:.1f}" for stage, value in seconds.items() if value is not None]
    if len(known) < len(seconds):
        known.append("others not known, as workers ended before they could tell them")
    return ", ".join(known)


def _warnings_text(counts: Mapping[str, int]) -> str:
    """How many images gave which warning of a decoder, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return "\n".join(f"{counted(count, 'image')}: {reason}" for reason, count in ordered)
