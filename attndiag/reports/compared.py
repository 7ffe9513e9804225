"""`compare`: methods side by side on a prompt set, as tables, verdicts and one page."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndiag.errors import AttnDiagError
from attndiag.reports import compared_words as words
from attndiag.reports.compared_figures import Drawn
from attndiag.reports.compared_page import figures_of, page
from attndiag.reports.figure_files import missing_glyphs_allowed, page_svg, rendered
from attndiag.reports.figure_style import style
from attndiag.reports.html import notebook_frame
from attndiag.reports.prompt_view import require_saveable
from attndiag.runs.folder import explained, write_atomically

if TYPE_CHECKING:
    import pandas as pd

    from attndiag.comparison.edges import EdgePlan, EdgeVerdicts
    from attndiag.comparison.one_prompt import Own
    from attndiag.comparison.side_by_side import Comparison
    from attndiag.explanations.replacement import Replacement
    from attndiag.models.load import LoadedModel
    from attndiag.prompts import Prompt, Target
    from attndiag.runs.compared_run import ComparedRun
    from attndiag.runs.plan import RunPlan
    from attndiag.stats.verdict_sets import Catalogues
    from attndiag.stats.verdicts import Thresholds, Verdicts

Progress = Callable[[str, int, int], None]
# the figure that a comparison is saved as, unless another one is named: the first of these that there is
_MAIN = ("compared_verdicts", "compared_agreement")


@dataclass(frozen=True, eq=False)
class Compared:
    """Methods compared on a prompt set. Shows itself in a notebook and saves itself as a page or a figure.

    Parameters
    ----------
    run : everything behind it (`attndiag.runs.compared_run.ComparedRun`): facts, card, self-checks, heads.
    """

    run: ComparedRun

    @property
    def comparison(self) -> Comparison:
        """The tables on tokens."""
        return self.run.comparison

    @property
    def edges(self) -> EdgeVerdicts | None:
        """Verdicts on edges and heads; None where they were not measured."""
        return self.run.edges

    @property
    def prompts(self) -> pd.DataFrame:
        """One row a prompt: m, noise floor, task check, tau between replacements."""
        return self.comparison.prompts

    @property
    def scores(self) -> pd.DataFrame:
        """One row a prompt, method and token."""
        return self.comparison.scores

    @property
    def agreement(self) -> pd.DataFrame:
        """One row a prompt, pair of methods and measure, with its null."""
        return self.comparison.agreement

    @property
    def agreement_summary(self) -> pd.DataFrame:
        """One row a pair and measure over all prompts, undefined ones counted."""
        return self.comparison.agreement_summary

    @property
    def faithfulness(self) -> pd.DataFrame:
        """One row a prompt, method and metric; controls among them, circular ones flagged."""
        return self.comparison.faithfulness

    @property
    def differences(self) -> pd.DataFrame:
        """Paired differences of methods by metric, with intervals and Holm's p."""
        return self.comparison.differences

    @property
    def verdicts(self) -> pd.DataFrame:
        """One row a prompt, method and token."""
        return self.comparison.verdicts

    @property
    def methods(self) -> pd.DataFrame:
        """One row a method: its verdict over the prompt set. The row with role `ceiling` made the evidence itself."""
        return self.comparison.methods

    @property
    def problems(self) -> pd.DataFrame:
        """What could not be measured, with the reason."""
        return self.comparison.problems

    @property
    def cases(self) -> Mapping[str, Catalogues]:
        """Method -> catalogues of disagreements and agreeing cases."""
        return self.comparison.cases

    @property
    def judged(self) -> Mapping[str, Verdicts]:
        """Method -> the verdicts on tokens as arrays."""
        return self.comparison.judged

    @property
    def blocked(self) -> bool:
        """A failed self-check blocked a verdict."""
        return self.run.blocked

    @property
    def headline(self) -> str:
        """What the comparison says, in one sentence."""
        return words.headline(self.comparison, self.edges)

    @cached_property
    def figures(self) -> Mapping[str, Drawn]:
        """Name -> figure, those that there is something to draw for."""
        return figures_of(self.run)

    @cached_property
    def _page(self) -> str:
        return page(self.run, lambda _name, drawn: page_svg(drawn.draw))

    def to_html(self) -> str:
        """The page: loads nothing."""
        return self._page

    def save(self, path: str | Path, *, figure: str | None = None) -> Path:
        """Write `x.html` (the whole page), or one figure as `x.png`, `x.svg`, `x.pdf`.

        Parameters
        ----------
        path : the suffix decides.
        figure : out of `figures`; the verdicts when None, the agreement where there are none.

        Raises
        ------
        AttnDiagError : another suffix, or a figure that there is nothing to draw for.
        RunFolderError : the file cannot be written.
        """
        path = Path(path)
        kind = require_saveable(path)
        if kind == "html":
            content = self.to_html().encode("utf-8", errors="replace")
        else:
            chosen = figure or next((name for name in _MAIN if name in self.figures), None)
            if chosen is None or chosen not in self.figures:
                known = ", ".join(self.figures) or "none: nothing was measured"
                raise AttnDiagError(f"there is no figure {chosen!r} of this comparison; there are {known}")
            with style(), missing_glyphs_allowed():
                content = rendered(self.figures[chosen].draw(), kind)
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: file.write(content))
        return path

    def show(self) -> Path | None:
        """Show the page: in the notebook where there is one, else in the browser, from a temporary file.

        Returns
        -------
        The file, or None in a notebook.
        """
        if _in_notebook():
            from IPython.display import HTML, display

            with warnings.catch_warnings():
                # IPython would rather have its own frame; ours has no address that it could load
                warnings.filterwarnings("ignore", message="Consider using IPython.display.IFrame")
                display(HTML(self._repr_html_()))
            return None
        import webbrowser

        path = self.save(Path(tempfile.mkdtemp(prefix="attndiag-")) / "compare.html")
        webbrowser.open(path.as_uri())
        return path

    def _repr_html_(self) -> str:
        return notebook_frame(self.to_html(), "attndiag compare")

    def __repr__(self) -> str:
        return f"Compared({len(self.prompts)} prompts, {len(self.methods)} methods: {self.headline})"


def compare(
    lm: LoadedModel,
    prompts: Prompt | str | Sequence[Prompt | str],
    methods: Sequence[str] | None = None,
    *,
    target: Target | Sequence[Target] | None = None,
    replacements: Sequence[Replacement | str] | None = None,
    own: Mapping[str, Sequence[Own]] | None = None,
    metrics: Sequence[str] | None = None,
    primary: tuple[str, str] | None = None,
    params: Mapping[str, Mapping[str, Any]] | None = None,
    thresholds: Thresholds | None = None,
    edges: EdgePlan | str | None = "auto",
    heads: bool = False,
    plan: RunPlan | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Compared:
    """Methods side by side on one token axis and one target, in memory; `attndiag.run` keeps the same in a folder.

    Parameters
    ----------
    methods : token methods of the catalogue, `weight`, `contribution`, ... (also `weight@L20`, `weight@L20H3`),
        `rollout`, `flow`, `alti_rollout`, `pattern_attribution`, `edge_effect`; eight of them when None.
    target : for all prompts or one each; each prompt's own when None.
    replacements : the first gives the evidence about tokens and replaces in the metrics; several are compared.
    own : name -> one entry a prompt, scores of its tokens or character spans (start, end, score).
    metrics : of faithfulness, see `stats.controls.METRICS`; empty leaves them out.
    primary : the pair of methods whose difference is the main question.
    params : method -> its parameters.
    thresholds : of the verdicts.
    edges : `"auto"` (all edges of the last query, a screen where they are many), `"all"`, `"screen"`, an `EdgePlan`, or
        None for none: each edge costs a restarted forward, and layers and heads get no verdicts without.
    heads : score every head on probes too.
    plan : a plan made before, instead of everything above but `target` and `own`.
    seed : of everything drawn.
    progress : called with (what is being done, prompts done, prompts in all).

    Returns
    -------
    Compared.

    Raises
    ------
    UnknownMethodError, NotApplicableError, ValueError : methods, replacements or a primary pair that cannot be.
    PromptError : no prompts, or two of one id.
    """
    from attndiag.runs.comparing import run

    done = run(
        lm,
        prompts,
        methods,
        target=target,
        replacements=replacements,
        own=own,
        metrics=metrics,
        primary=primary,
        params=params,
        thresholds=thresholds,
        edges=edges,
        heads=heads,
        plan=plan,
        seed=seed,
        progress=progress,
    )
    return Compared(done)


def _in_notebook() -> bool:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    # a terminal shows text only
    return shell is not None and getattr(shell, "kernel", None) is not None
