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
# # Is the token with the largest weight the one that counts?
#
# First on a model whose right answers are known, then on a trained one. About a minute on one core; the trained model is
# installed from the package index on first use.

# %%
# %matplotlib inline
import pandas as pd

import attndiag as ad
from attndiag.comparison.edges import edge_verdicts
from attndiag.models.known import dead_heads, sink_against_value
from attndiag.reports.figure_style import HEAD, INK, LAYER, WEIGHT, canvas, style
from attndiag.runs.prompt_files import shipped_prompts


def three_measures(lm, prompt):
    """Weight, contribution and size of the effect of every edge of the last query in layer 0."""
    with ad.capture(lm) as captured:
        lm.forward(prompt)
    call = captured.calls[0]
    call.certificate.check()
    frame = ad.contributions(call, "weight").to_frame().rename(columns={"value": "weight"})
    frame["contribution"] = ad.contributions(call, "head_contribution").to_frame()["value"]
    frame = frame[frame["query_pos"] == frame["query_pos"].max()].copy()
    frame["effect"] = ad.edge_effects(lm, prompt, queries=[-1]).values[0, :, -1].flatten().abs()
    frame["key"] = [lm.encode(prompt).tokens[0][j] for j in frame["key_pos"]]
    return frame[frame["weight"] > 0.01][["head", "key", "weight", "contribution", "effect"]].round(3)


# %% [markdown]
# ## A sink without a value
#
# A one-layer model set by hand. Both heads put .9 of their weight on `<bos>` and .1 on `MARK`. In head 0 `<bos>` has
# almost no value; in head 1 both tokens carry the same. The weights are equal, so no look at the weights can tell these
# heads apart.

# %%
known = sink_against_value()
lm = ad.load(known.model, tokenizer=known.tokenizer())
prompt = ad.Prompt(known.text(), target="ANS", foil="FOIL")
sink = three_measures(lm, prompt)
sink

# %% [markdown]
# The verdict compares the share of the weight with the effect: `<bos>` in head 0 has a high weight without an effect, in
# head 1 a high weight with one.

# %%
verdicts = edge_verdicts(lm, prompt)
edges = verdicts.edges("weight")
edges.loc[edges["key"] < 2, ["head", "token", "claim", "effect", "present_from", "state", "verdict"]].round(3)

# %% [markdown]
# ## A contribution without an effect
#
# Four heads, all of their weight on `MARK`. Only head 0 does something: head 1 has no values, head 2 no output weights,
# and what head 3 writes is read by nobody. The contribution finds the first two. The third needs an intervention.

# %%
known = dead_heads()
dead = three_measures(
    ad.load(known.model, tokenizer=known.tokenizer()), ad.Prompt(known.text(), target="ANS", foil="FOIL")
)
dead

# %% [markdown]
# ## A trained model: where the weight goes, and what arrives
#
# SmolLM2-135M on one shipped prompt of each of 16 templates, all 30 layers, all queries but the first. The first token
# takes most of the weight. Of what single heads write it has a smaller part, and smaller still of what whole layers
# write, where heads cancel.

# %%
lm = ad.load("default", device="cpu")
by_cluster = {}
for prompt in shipped_prompts():
    if prompt.foil is not None:
        by_cluster.setdefault(prompt.cluster, prompt)
prompts = list(by_cluster.values())

rows = []
for prompt in prompts:
    with ad.capture(lm) as captured:
        lm.forward(prompt)
    for call in captured.calls:
        call.certificate.check()
        parts = {"layer": call.layer}
        for kind in ("weight", "head_contribution", "contribution"):
            values = ad.contributions(call, kind, certificate="sampled").values[0][..., 1:, :]
            parts[kind] = float((values[..., 0] / values.sum(-1)).mean())
        rows.append(parts)
by_layer = pd.DataFrame(rows).groupby("layer").mean()
by_layer.mean().round(3).to_frame("share of the first token")

# %%
with style():
    figure, axis = canvas(6.4, 3.0)
    for kind, colour in (("weight", WEIGHT), ("head_contribution", HEAD), ("contribution", LAYER)):
        axis.plot(by_layer.index, by_layer[kind], marker="o", color=colour, label=kind)
    axis.set(
        xlabel="layer",
        ylabel="share of the first token",
        ylim=(0, 1),
        title="What the first token takes and gives",
    )
    axis.legend()
figure

# %% [markdown]
# ## And the effect?
#
# For eight of the prompts, every edge into the last token in layers 17 and 23 is removed, one at a time. The effect of
# each head's key with the largest weight is present (at least the mean of the head's effects), absent (less than half
# that mean) or neither; below 2 % of m it is absent in any case.

# %%
verdicts = edge_verdicts(lm, prompts[:8], layers=[17, 23])
edges = verdicts.edges("weight")
edges["contribution"] = verdicts.edges("head_contribution")["share"]


def by_place(column):
    """How often the key that leads by `column` has an effect, on the first token and elsewhere."""
    top = edges.loc[edges.groupby(["prompt", "layer", "head"])[column].idxmax()]
    place = top["key"].eq(0).map({True: "first token", False: "elsewhere"}).rename("largest " + column)
    grouped = top.groupby(place)
    return pd.DataFrame(
        {
            "heads": grouped.size(),
            "mean weight": grouped["share"].mean(),
            "mean share of contribution": grouped["contribution"].mean(),
            "effect present": grouped["state"].agg(lambda state: (state == "present").mean()),
        }
    )


edges["weight"] = edges["share"]
by_weight, by_contribution = by_place("weight"), by_place("contribution")
by_weight.round(2)

# %%
by_contribution.round(2)

# %%
with style():
    figure, axes = canvas(6.4, 3.0, ncols=2, sharey=True)
    for axis, column, colour in ((axes[0], "weight", WEIGHT), (axes[1], "contribution", HEAD)):
        for first, marker, label in ((True, "x", "first token"), (False, "o", "elsewhere")):
            some = edges[edges["key"].eq(0) == first]
            axis.scatter(
                some[column],
                some["effect"],
                s=10,
                marker=marker,
                alpha=0.6,
                label=label,
                color=colour if not first else INK,
            )
        axis.axhline(0, color=INK, lw=0.5)
        axis.set(title=column, xlabel="share of the row", xlim=(0, 1))
    axes[0].set_ylabel("effect, logits")
    axes[0].legend()
figure

# %% [markdown]
# ## Answer

# %%
first, rest = by_weight.loc["first token"], by_weight.loc["elsewhere"]
print(
    f"Sink model: .9 of the weight and an effect of {sink.iloc[0]['effect']:.3f} in head 0, of {sink.iloc[2]['effect']:.3f} in "
    "head 1, from the same pattern."
)
print(
    "SmolLM2: the first token has "
    f"{by_layer['weight'].mean():.0%} of the weight, {by_layer['head_contribution'].mean():.0%} of what single heads "
    f"write, {by_layer['contribution'].mean():.0%} of what layers write."
)
print(
    f"No: where a head's largest weight is on the first token ({first['heads']:.0f} of {first['heads'] + rest['heads']:.0f} "
    f"heads and prompts), removing that edge has an effect in {first['effect present']:.0%} of the cases."
)
print(
    f"But weights are no noise: where the largest weight is on another token, it has an effect in "
    f"{rest['effect present']:.0%}."
)
