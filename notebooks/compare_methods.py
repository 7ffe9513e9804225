# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Do methods that explain the same answer agree, and which one predicts what a replacement does?
#
# Six methods name the tokens that an answer rests on: attention weights, two value-aware contributions, ALTI put together
# over the layers, weights times their gradients, and embeddings times theirs. They are compared on twelve shipped prompts of
# twelve templates, and held against what happens when each token is deleted. Less than two minutes on one core; the model
# is installed from the package index on first use.

# %%
# %matplotlib inline
import numpy as np

import attndiag as ad
from attndiag.reports.figure_style import INK, MUTED, canvas, style
from attndiag.runs.prompt_files import shipped_prompts
from attndiag.stats.agreement import tau_needed

lm = ad.load("default", device="cpu")
by_cluster = {}
for prompt in shipped_prompts():
    if prompt.foil is not None:
        by_cluster.setdefault(prompt.cluster, prompt)
prompts = list(by_cluster.values())[:12]
methods = [
    "weight",
    "head_contribution",
    "contribution",
    "alti_rollout",
    "pattern_attribution",
    "input_x_gradient",
]

compared = ad.compare(
    lm,
    prompts,
    methods,
    replacements=["delete"],
    metrics=["effect_tau"],
    edges=None,
    primary=("weight", "contribution"),
)
compared.prompts[["prompt", "m", "noise_floor", "task", "admissible"]].round(2)

# %% [markdown]
# An empty `task` says that the model does what the prompt asks. Everything below is about the same tokens and the same m:
# the logit of the answer minus that of the foil. The first token, a sink, is not ranked.

# %% [markdown]
# ## Agreement
#
# Kendall's tau-b between two methods' rankings of a prompt's tokens, averaged over the prompts. It describes how alike they
# are; two methods can agree and both be wrong.

# %%
tau = compared.agreement[compared.agreement["measure"] == "tau_b"]
names = [*methods, next(name for name in compared.methods["method"] if name.startswith("replacement"))]
grid = np.eye(len(names))
for (first, second), part in tau.groupby(["first", "second"]):
    a, b = names.index(first), names.index(second)
    grid[a, b] = grid[b, a] = part["value"].mean()
needed = np.mean([tau_needed(n) for n in tau.groupby("prompt")["items"].first()])
print(f"on one prompt, |tau| of about {needed:.2f} is needed at 95 %")

labels = [*methods, "deletion effect"]
with style():
    figure, axis = canvas(5.4, 4.4)
    image = axis.imshow(
        np.ma.masked_array(grid, np.eye(len(names), dtype=bool)), cmap="PuOr", vmin=-1, vmax=1
    )
    for a in range(len(names)):
        for b in range(len(names)):
            if a != b:
                axis.text(
                    b,
                    a,
                    f"{grid[a, b]:.2f}",
                    ha="center",
                    va="center",
                    color="white" if abs(grid[a, b]) > 0.6 else INK,
                )
    axis.set_xticks(range(len(labels)), labels, rotation=35, ha="right")
    axis.set_yticks(range(len(labels)), labels)
    axis.spines[:].set_visible(False)
    axis.set_title("mean tau-b over twelve prompts")
    figure.colorbar(image, ax=axis, shrink=0.7)
figure

# %% [markdown]
# ## Which one predicts the effect?
#
# `effect_tau` is the same tau against the effects of deleting single tokens, beside twenty random orders. The row of
# the replacement itself is circular: it made the evidence and agrees with itself. Here the first token is
# ranked too, so the numbers are not those of the last column above.

# %%
found = compared.differences[compared.differences["second"] == "random"].set_index("first")
table = found[["difference", "low", "high", "p_holm", "circular", "enough_clusters"]]
table.round(3)

# %%
rows = compared.faithfulness[~compared.faithfulness["control"].astype(bool)]
with style():
    figure, axis = canvas(6.0, 2.8)
    for place, method in enumerate(methods):
        values = rows.loc[rows["method"] == method, "value"]
        axis.plot(values, [place] * len(values), "o", color=MUTED, alpha=0.5)
        axis.plot(values.mean(), place, "D", color=INK, markersize=5)
    axis.axvline(0, color=INK, lw=0.5)
    axis.set_yticks(range(len(methods)), methods)
    axis.set(
        xlim=(-1, 1),
        xlabel="tau with the effects of deleting single tokens",
        title="one dot a prompt, and the mean",
    )
    axis.invert_yaxis()
figure

# %% [markdown]
# ## Verdicts
#
# By token: does a large share go with an effect, a small one with none? `inconclusive` holds all tokens of which the method
# claims neither.
#
# `hit_rate` is the share of right ones among those that matter: claimed high, or with an effect of at least an even share.
# Every method marks tokens whose deletion shows next to nothing, and misses others; none is right on half of them.

# %%
columns = [
    "method",
    "agree",
    "disagree",
    "inconclusive",
    "weights_without_effect",
    "effects_without_weight",
    "hit_rate",
    "p_chance",
]
verdicts = compared.methods[compared.methods["role"] == "method"][columns]
verdicts.round(3)

# %% [markdown]
# `compared` shows itself as a page with all of it: `compared.save("compare.html")`.
#
# ## Answer

# %%
between = {
    (a, b): grid[names.index(a), names.index(b)] for i, a in enumerate(methods) for b in methods[i + 1 :]
}
closest, farthest = max(between, key=between.get), min(between, key=between.get)
means = rows[rows["method"].isin(methods)].groupby("method")["value"].mean().sort_values()
print(
    f"Most alike: {closest[0]} and {closest[1]}, tau {between[closest]:.2f}. Least: {farthest[0]} and {farthest[1]}, {between[farthest]:.2f}."
)
print(
    f"Nearest to the effects of deletion: {means.index[-1]} with a mean tau of {means.iloc[-1]:.2f}; farthest: {means.index[0]}, "
    f"{means.iloc[0]:.2f}. The weights reach {means['weight']:.2f}."
)
sure = table[(table["p_holm"] < 0.05) & ~table["circular"].astype(bool)]
print(
    f"Better or worse than random orders beyond chance, by Holm, on {len(prompts)} templates: {', '.join(sure.index) or 'none'}."
)
