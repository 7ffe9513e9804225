"""An audit as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attndiag.explanations.audit_run import Audit, LayerReach


def audit_text(audit: Audit) -> str:
    """Findings first, then what was asked, then what was measured."""
    lines = [f"audit of {audit.model}: {len(audit.findings) or 'no'} finding{'s' if len(audit.findings) != 1 else ''}"]
    lines += [f"  {finding}" for finding in audit.findings]
    lines += ["", "checks"]
    width = max(len(check.name) for check in audit.checks)
    lines += [f"  {check.name:<{width}}  {check.state:<11}  {check.detail}" for check in audit.checks]
    if audit.reach:
        lines += ["", f"reach of each layer (probe of {audit.length} tokens)"]
        lines += [f"  {line}" for line in _reach_lines(audit.reach)]
    if audit.stack_reach is not None:
        back, ahead = audit.stack_reach
        lines.append(f"  whole model: {back} positions back, {ahead} ahead")
    used = [row for row in audit.scale.rows if row.variant == "as used"]
    if used:
        lines += ["", f"scores (scale judged against {audit.scale.reference})"]
        lines.append(f"  {'layer':<6}{'scale':>9}{'sd q.k':>9}{'sd score':>10}{'gap':>8}{'> .99':>8}{'jacobian':>10}")
        lines += [
            f"  {'' if r.layer is None else r.layer!s:<6}{r.scale:>9.4g}{r.dot_sd:>9.3g}{r.score_sd:>10.3g}"
            f"{r.top_gap:>8.3g}{r.saturated:>8.1%}{r.jacobian:>10.3g}"
            for r in used
        ]
    lines += [f"  {reason}" for reason in audit.scale.unmeasured]
    lines += ["", "rows without an allowed key (shown, not judged)"]
    lines += [f"  {row.implementation:<44}{row.answer}" for row in audit.masked_rows]
    return "\n".join(lines)


def _reach_lines(reach: tuple[LayerReach, ...]) -> list[str]:
    """Neighbouring layers that are alike on one line."""
    groups: list[list[LayerReach]] = []
    for layer in reach:
        last = groups[-1][-1] if groups else None
        if last is not None and (last.shape, last.past, last.future, last.kind) == (
            layer.shape,
            layer.past,
            layer.future,
            layer.kind,
        ):
            groups[-1].append(layer)
        else:
            groups.append([layer])
    lines = []
    for group in groups:
        first, last = group[0], group[-1]
        name = first.module_name if len(group) == 1 else f"{first.module_name} .. {last.module_name}"
        least = "at least " if first.limited else ""
        lines.append(f"{name}: {first.shape}, {least}{first.past} back, {first.future} ahead")
    return lines
