"""A card as plain text and as HTML. Layers that are alike share a row."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attndiag.explanations.attention_card import AttentionCard, LayerCard

_COLUMNS = ("layers", "kind", "heads", "kv", "d_head", "mask", "positions", "scale", "extras", "kernel", "dtype")


def card_text(card: AttentionCard) -> str:
    """Head, table, differences, limits."""
    rows = [list(_COLUMNS), *(_row(group) for group in groups_of(card.layers))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [*_head(card), ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for title, entries in _lists(card):
        lines += ["", title, *(f"  {entry}" for entry in entries)]
    return "\n".join(lines)


def card_html(card: AttentionCard) -> str:
    """The same as a fragment: one heading, one table, lists."""
    head = "".join(f"<li>{escape(line)}</li>" for line in _head(card)[1:])
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in _COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _row(group)) + "</tr>"
        for group in groups_of(card.layers)
    )
    lists = "".join(
        f"<h3>{escape(title)}</h3><ul>{''.join(f'<li>{escape(entry)}</li>' for entry in entries)}</ul>"
        for title, entries in _lists(card)
    )
    return (
        f'<section class="attndiag-card"><h2>{escape(_head(card)[0])}</h2><ul>{head}</ul>'
        f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>{lists}</section>"
    )


def groups_of(layers: tuple[LayerCard, ...]) -> list[list[LayerCard]]:
    """Layers that differ in nothing but their names and numbers, in the order of their first member."""
    groups: dict[LayerCard, list[LayerCard]] = {}
    for layer in layers:
        output = None if layer.output is None else layer.output.rpartition(".")[2]
        alike = replace(layer, module_name=_stack(layer.module_name), layer=None, output=output, limits=())
        groups.setdefault(alike, []).append(layer)
    return list(groups.values())


def _head(card: AttentionCard) -> list[str]:
    cache = "no key/value cache"
    if card.cache_bytes_per_token is not None:
        cache = f"{card.cache_bytes_per_token:,} bytes of key/value cache a token"
        cache += f" and {card.cache_bytes_fixed:,} bytes of fixed state" if card.cache_bytes_fixed else ""
    certified = [layer.certified for layer in card.layers if layer.certified is not None]
    return [
        f"{card.model}: {card.architecture}, {card.n_parameters / 1e6:,.1f} M parameters",
        f"{card.dtype} on {card.device}, attention asked for: {card.attn_implementation or 'not stated'}",
        f"{cache}; probe of {card.length} tokens; {sum(certified)} of {len(certified)} calls certified",
    ]


def _row(group: list[LayerCard]) -> list[str]:
    first = group[0]
    extras = []
    if first.softcap is not None:
        extras.append(f"soft-cap {first.softcap:g}")
    if first.sinks:
        extras.append("sinks")
    if first.window_told is not None and first.window_seen != first.window_told:
        extras.append(f"told window {first.window_told}")
    if first.d_value is not None and first.d_head is not None and first.d_value != first.d_head:
        extras.append(f"values of {first.d_value}")
    if first.kind == "mixer":
        extras.append(first.module_class)
    return [
        f"{_stack(first.module_name)} {_ranges([layer.layer for layer in group])}".strip(),
        first.kind,
        _text(first.query_heads),
        _text(first.kv_heads),
        _text(first.d_head),
        first.mask or "-",
        first.positions if first.kind != "mixer" else "-",
        "-" if first.scale is None else f"{first.scale:.4g}",
        ", ".join(extras) or "-",
        first.kernel or "-",
        first.dtype or "-",
    ]


def _lists(card: AttentionCard) -> list[tuple[str, list[str]]]:
    found = []
    if card.differences:
        found.append(("differences from the config", [str(difference) for difference in card.differences]))
    able: dict[tuple[str, ...], list[int | None]] = {}
    unable: dict[str, list[int | None]] = {}
    for layer in card.layers:
        able.setdefault(layer.measurable, []).append(layer.layer)
        for limit in layer.limits:
            unable.setdefault(limit, []).append(layer.layer)
    found.append(("can be measured", [f"layers {_ranges(n)}: {', '.join(names)}" for names, n in able.items()]))
    if unable:
        found.append(("cannot be measured", [f"layers {_ranges(n)}: {limit}" for limit, n in unable.items()]))
    if card.maps:
        found.append(("implied maps of the mixers", [_map_line(facts) for facts in card.maps]))
    return found


def _map_line(facts: dict[str, Any]) -> str:
    """One mixer's implied map in words, or why it has none."""
    if "refused" in facts:
        return facts["refused"]
    columns = "tokens" if facts["columns"] == "token" else "positions behind a short convolution"
    errors = [f"misses the scan by {facts['core_error']:.0e}"]
    if facts["output_error"] is not None:
        errors.append(f"the module's output by {facts['output_error']:.0e} with norm and gate frozen")
    if facts["unfrozen_error"] is not None:
        errors.append(f"by {facts['unfrozen_error']:.0e} without")
    return (
        f"{facts['module_name']}: one map a {facts['map_of']}, columns are {columns}; {', '.join(errors)}; row sums "
        f"{facts['row_sum_smallest']:.2g} to {facts['row_sum_largest']:.2g}, {facts['negative_share']:.0%} negative"
    )


def _stack(name: str) -> str:
    """A module's name without its number: `model.layers.*.self_attn`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _ranges(layers: list[int | None]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2, 5"`."""
    numbers = sorted({layer for layer in layers if layer is not None})
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "unnumbered"


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)
