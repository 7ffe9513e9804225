"""The entries: every method with what it gives, costs and needs, and where it comes from."""

from __future__ import annotations

from typing import Any

from attndiag.catalog.record import Method, catalogue

_GRADIENTS = "attndiag.explanations.gradients"
_SAMPLED = "attndiag.explanations.sampled_gradients"
_SURROGATES = "attndiag.explanations.surrogates"
_EDGES = "attndiag.explanations.pattern_gradients:pattern_gradients"
_FREEDOM = "attndiag.explanations.pattern_freedom"
_TRUTH = "attndiag.explanations.edge_truth:edge_effects"
_EDGE_WORK = "attndiag.explanations.causal_work:edge_work"
_PATCHING = "attndiag.explanations.patching"
_INTERVENTIONS = "attndiag.explanations.interventions"
_CONTRIBUTIONS = "attndiag.explanations.model_contributions:model_contributions"


def _estimate(method: str, what: str, cost: str) -> Method:
    home = "attndiag.explanations.edge_estimators:edge_estimates"
    needs = ("attention weights", "gradients", *(("restarts",) if method != "first_order" else ()))
    name = f"edge_estimate_{method}"
    return Method(name, what, home, "edge", "signed", "target", cost, needs, call="prompt", fixed={"method": method})


def _value_effect(name: str, value: str, what: str) -> Method:
    home = "attndiag.explanations.value_zeroing:value_effects"
    cost, needs = "1 + n forwards", ("attention weights",)
    return Method(name, what, home, "token", "signed", "target", cost, needs, call="prompt", fixed={"value": value})


def _contribution(kind: str, what: str, source: str, **more: Any) -> Method:
    given: dict[str, Any] = {
        "scope": "edge",
        "sign": "non-negative",
        "unit": "residual norm",
        "cost": "1 forward",
        "needs": ("attention weights", "an output projection"),
        "call": "untargeted",
        "fixed": {"kind": kind},
    }
    return Method(kind, what, _CONTRIBUTIONS, source=source, **{**given, **more})


CATALOG = catalogue(
    [
        # ------------------------------------------------------------------------------- tokens
        Method(
            "replacement",
            "effect of replacing a token, a word or a span, m(x) - mean m(replaced)",
            "attndiag.explanations.replacement_effects:replacement_effects",
            "token",
            "signed",
            "target",
            "n * draws forwards, shorter with a shared prefix",
        ),
        Method(
            "saliency",
            "length of the gradient in each token's embedding",
            f"{_GRADIENTS}:saliency",
            "token",
            "non-negative",
            "target per embedding unit",
            "1 forward + 1 backward",
            ("gradients",),
            "Simonyan 2013, arXiv 1312.6034",
        ),
        Method(
            "input_x_gradient",
            "embedding times gradient",
            f"{_GRADIENTS}:input_x_gradient",
            "token",
            "signed",
            "target",
            "1 forward + 1 backward",
            ("gradients",),
            "Shrikumar 2016, arXiv 1605.01713",
        ),
        Method(
            "integrated_gradients",
            "gradients along the path from a named baseline, completeness gap measured",
            f"{_GRADIENTS}:integrated_gradients",
            "token",
            "signed",
            "target",
            "32 to 992 forwards + backwards (steps double until the gap closes)",
            ("gradients",),
            "Sundararajan 2017, arXiv 1703.01365",
        ),
        Method(
            "gradient_shap",
            "expected gradients over baselines and points of the path, with standard error",
            f"{_SAMPLED}:gradient_shap",
            "token",
            "signed",
            "target",
            "64 forwards + backwards (samples)",
            ("gradients",),
            "Lundberg 2017, arXiv 1705.07874",
        ),
        Method(
            "deeplift",
            "rescale rule, only where captum has a rule for the model's activations",
            f"{_SAMPLED}:deeplift",
            "token",
            "signed",
            "target",
            "2 forwards + 1 backward",
            ("gradients", "activation modules with a rule (ReLU, Tanh, ...)"),
            "Shrikumar 2017, arXiv 1704.02685",
        ),
        Method(
            "occlusion",
            "m(x) - m(window of tokens at a baseline embedding)",
            f"{_SURROGATES}:occlusion",
            "token",
            "signed",
            "target",
            "n forwards",
            (),
            "Zeiler 2014, arXiv 1311.2901",
        ),
        Method(
            "lime",
            "ridge regression of m on which tokens are present",
            f"{_SURROGATES}:lime",
            "token",
            "signed",
            "target",
            "256 forwards (samples)",
            (),
            "Ribeiro 2016, arXiv 1602.04938",
        ),
        Method(
            "kernel_shap",
            "Shapley values of the tokens by weighted least squares",
            f"{_SURROGATES}:kernel_shap",
            "token",
            "signed",
            "target",
            "512 forwards (samples)",
            (),
            "Lundberg 2017, arXiv 1705.07874",
        ),
        _value_effect("value_zeroing_effect", "zero", "exact effect of a token's values being zero"),
        _value_effect("mean_value_effect", "mean", "exact effect of a token's values being the prompt's mean"),
        Method(
            "induction",
            "attention of the heads with the highest prefix-matching scores",
            "attndiag.explanations.induction_attention:induction_attention",
            "token",
            "non-negative",
            "mass",
            "1 forward, and 2 of a probe once for a model",
            ("attention weights", "causal attention with induction heads"),
            "Olsson 2022, arXiv 2209.11895",
            call="prompt",
        ),
        # -------------------------------------------------------------------------------- edges
        Method(
            "edge_effect",
            "exact effect of removing each edge, or renormalising its row without it",
            _TRUTH,
            "edge",
            "signed",
            "target",
            "one restarted forward for each edge",
            ("attention weights",),
            call="prompt",
            work=_EDGE_WORK,
        ),
        Method(
            "pattern_gradient",
            "gradient in each attention weight",
            _EDGES,
            "edge",
            "signed",
            "target per unit of weight",
            "1 forward + 1 backward",
            ("attention weights", "gradients"),
            fixed={"kind": "gradient"},
        ),
        Method(
            "pattern_attribution",
            "weight times its gradient: the first-order effect of removing an edge",
            _EDGES,
            "edge",
            "signed",
            "target",
            "1 forward + 1 backward",
            ("attention weights", "gradients"),
            "attribution patching, arXiv 2310.10348",
            fixed={"kind": "attribution"},
        ),
        _estimate("first_order", "the same as an estimate, with the real change of the row", "1 forward + 1 backward"),
        _estimate("own_position", "the strongest edges refined at their own position", "1 + 1, and a token an edge"),
        _estimate(
            "with_target", "the strongest refined at their own and the target's position", "1 + 1, and two tokens"
        ),
        _estimate("recomputed", "the strongest computed exactly", "1 + 1, and a restart an edge"),
        Method(
            "target_attribution",
            "what a head and key write along the direction that the target reads; the direct path only",
            "attndiag.explanations.direct_attribution:target_attributions",
            "edge",
            "signed",
            "target",
            "2 forwards + 1 backward through the unembedding",
            ("attention weights", "an output projection", "a pre-norm residual stream", "gradients"),
            "ALTI-Logit, arXiv 2305.12535",
            call="prompt",
        ),
        # -------------------------------------------------------- activations of a prompt and its counterfactual
        Method(
            "activation_patching",
            "exact effect of putting single activations of one run into the other",
            f"{_PATCHING}:activation_patching",
            "activation",
            "signed",
            "target",
            "2 forwards and one for each layer and position (and head)",
            ("a counterfactual of the same length", "numbered blocks"),
            "Meng 2022, arXiv 2202.05262",
            call="pair",
            work="attndiag.explanations.causal_work:patching_work",
        ),
        Method(
            "attribution_patching",
            "its first-order estimate, with the exact effect of the largest",
            f"{_PATCHING}:attribution_patching",
            "activation",
            "signed",
            "target",
            "3 forwards + 1 backward, and one forward for each exact value",
            ("a counterfactual of the same length", "numbered blocks", "gradients"),
            "Syed 2023, arXiv 2310.10348",
            call="pair",
        ),
        # ---------------------------------------------------------------- heads, sets of heads and layers
        Method(
            "head_effect",
            "exact effect of removing all edges of a head",
            _TRUTH,
            "head",
            "signed",
            "target",
            "one restarted forward for each head",
            ("attention weights",),
            call="prompt",
            fixed={"grain": "head"},
            work=_EDGE_WORK,
        ),
        Method(
            "head_ablation",
            "exact effect of a set of heads ablated together, because redundant heads hide each other",
            f"{_INTERVENTIONS}:ablate_heads",
            "prompt",
            "signed",
            "target",
            "2 forwards, and one for each donor",
            ("attention weights",),
            call="prompt",
        ),
        Method(
            "attention_off",
            "exact effect of a layer's attention writing nothing, its bias included",
            f"{_INTERVENTIONS}:attention_off",
            "layer",
            "signed",
            "target",
            "1 forward and one for each layer",
            ("an output projection",),
            call="prompt",
        ),
        Method(
            "pattern_freedom",
            "how far an adversary moves a head's pattern while m stays within epsilon; uniform and permuted beside it",
            f"{_FREEDOM}:pattern_freedom",
            "head",
            "non-negative",
            "nats",
            "170 forwards and 60 backwards for each head",
            ("attention weights", "gradients"),
            "Jain 2019, arXiv 1902.10186; Wiegreffe 2019, arXiv 1908.04626",
            call="prompt",
        ),
        Method(
            "frozen_pattern",
            "effect of running with the weights that a head has on another prompt",
            f"{_FREEDOM}:frozen_pattern",
            "head",
            "signed",
            "target",
            "2 forwards and one for each head",
            ("attention weights", "another prompt of the same length"),
            "Wiegreffe 2019, arXiv 1908.04626",
            call="prompt",
        ),
        Method(
            "temperature_sweep",
            "effect of dividing a head's scores by t, with the entropies",
            f"{_FREEDOM}:temperature_sweep",
            "head",
            "signed",
            "target",
            "8 forwards for each head (temperatures)",
            ("attention weights",),
            call="prompt",
        ),
        # -------------------------------------------------------------------- edges, about no target
        _contribution("weight", "the attention weights", "definition", unit="mass", needs=("attention weights",)),
        _contribution(
            "value_norm",
            "weight times length of the value; depends on the basis of the values",
            "Kobayashi 2020, arXiv 2004.10102",
            unit="value norm",
            needs=("attention weights",),
        ),
        _contribution(
            "head_contribution", "length of what a key writes through one head", "Kobayashi 2020, arXiv 2004.10102"
        ),
        _contribution(
            "contribution", "length of what a key writes through all heads together", "Kobayashi 2020, arXiv 2004.10102"
        ),
        _contribution(
            "contribution_residual",
            "the same with the residual stream on the diagonal",
            "Kobayashi 2021, arXiv 2109.07152",
            needs=("attention weights", "an output projection", "a residual stream"),
        ),
        _contribution(
            "contribution_norm",
            "the same after the norm layer, linearised at its input",
            "Kobayashi 2021, arXiv 2109.07152",
            unit="norm-layer output norm",
            needs=("attention weights", "an output projection", "a norm after the residual, or norm='next'"),
        ),
        _contribution(
            "mixing_ratio",
            "share of what a position takes from others, against what it keeps",
            "Kobayashi 2021, arXiv 2109.07152",
            unit="ratio",
            scope="row",
            needs=("attention weights", "an output projection", "a residual stream"),
        ),
        _contribution(
            "projection", "part of the attention output that a key accounts for", "definition", sign="signed"
        ),
        Method(
            "value_zeroing",
            "share of a position's block output that turns when a token's value is zero",
            "attndiag.explanations.value_zeroing:value_zeroing",
            "edge",
            "non-negative",
            "share of row",
            "1 forward, and one of n rows to each layer",
            ("attention weights", "numbered blocks"),
            "Mohebbi 2023, arXiv 2301.12971",
            call="untargeted",
        ),
        _contribution(
            "alti",
            "share of a row by L1 distance to the block's output",
            "Ferrando 2022, arXiv 2203.04212",
            unit="share of row",
            needs=("attention weights", "an output projection", "a residual stream"),
        ),
        _contribution(
            "alti_l2",
            "the same by L2 distance",
            "Ferrando 2022, arXiv 2203.04212",
            unit="share of row",
            needs=("attention weights", "an output projection", "a residual stream"),
        ),
    ]
)
"""Every method by name."""
