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
# # Does this weight matter?
#
# A head gives a token three quarters of its attention. Does the answer need it? One prompt, one layer, three
# measurements: the weight, what the key writes, and what the answer loses without it. About twenty seconds on one core;
# the model is installed from the package index on first use.

# %%
# %matplotlib inline
import attndiag as ad
from attndiag.reports.figure_style import HEAD, INK, LAYER, WEIGHT, canvas, style

lm = ad.load("default", device="cpu")
prompt = ad.Prompt(
    "When Mary and John went to the store, John gave a drink to",
    target=" Mary",
    foil=" John",
    pair="When Mary and John went to the store, Mary gave a drink to",
)
tokens = lm.encode(prompt).tokens[0]
print(list(enumerate(tokens)))

# %% [markdown]
# The one number that everything is about is m = logit(" Mary") - logit(" John") at the last token. " Mary" is also the
# model's first choice, so the model does what the prompt asks.

# %%
clean = ad.score(lm, prompt)
print(
    f"m = {float(clean.values[0]):.2f} {clean.unit}; first choice is the target: {clean.checks['top1_is_answer'][0]}"
)

# %% [markdown]
# ## Capture
#
# Inside the block every attention call of layer 23 leaves a record of what entered and left the attention function. The
# model runs its own kernel and computes what it would have computed. The certificate says, in numbers, that the record
# reproduces it; `check()` raises where it does not.

# %%
with ad.capture(lm, layers=[23]) as captured:
    lm.forward(prompt)
call = captured.calls[0]
proof = call.certificate.check()
print(call)
print(
    f"errors: A v {proof.value_error:.0e}, formula {proof.formula_error:.0e}, output {proof.output_error:.0e}"
)

# %% [markdown]
# ## Weight against contribution
#
# The weight A says how much of a value is taken. The contribution A‖vW_O‖ is the length of what arrives in the residual
# stream. For the last query of each head: the key with the largest weight, and the share of the row's contribution that
# this key has.

# %%
weight = ad.contributions(call, "weight").values[0, :, -1]
written = ad.contributions(call, "head_contribution").values[0, :, -1]
share = written / written.sum(-1, keepdim=True)
top = weight.argmax(-1)

# %% [markdown]
# ## Effect
#
# Removing an edge (A_ij = 0, the rest of the row untouched) and reading m again is the only one of the three that asks
# the model. `edge_effects` does it for every edge into the last token of this layer.

# %%
import pandas as pd

effects = ad.edge_effects(lm, prompt, layers=[23], queries=[-1]).values[0, :, -1]
rows = range(call.n_heads)
table = pd.DataFrame(
    {
        "head": rows,
        "key": [f"{int(j)} {tokens[j]!r}" for j in top],
        "weight": [float(weight[h, top[h]]) for h in rows],
        "share of contribution": [float(share[h, top[h]]) for h in rows],
        "effect": [float(effects[h, top[h]]) for h in rows],
        "largest effect of the row": [float(effects[h].abs().max()) for h in rows],
        "at": [f"{int(j)} {tokens[j]!r}" for j in effects.abs().argmax(-1)],
    }
)
table.round(3)

# %%
with style():
    figure, axes = canvas(6.4, 2.8, ncols=3, sharey=True)
    for axis, column, colour, unit in (
        (axes[0], "weight", WEIGHT, "share of the row"),
        (axes[1], "share of contribution", HEAD, "share of the row"),
        (axes[2], "effect", LAYER, f"{clean.unit} lost without the edge"),
    ):
        axis.barh(table["head"], table[column], color=colour, height=0.7)
        axis.axvline(0, color=INK, lw=0.6)
        axis.set(title=column, xlabel=unit)
    for axis in axes[:2]:
        axis.set_xlim(0, 1)
    axes[0].set_yticks(list(rows), [f"head {h}, {tokens[top[h]]!r}" for h in rows])
    axes[0].invert_yaxis()
figure

# %% [markdown]
# ## One knock-out by hand
#
# The edge from the last token to the second " John" in head 3. `mode="remove"` takes it out, `"renormalize"` also gives
# its mass to the other keys. Effects are m(clean) - m(edited): positive where the edge helped.

# %%
results = {}
for mode in ("remove", "renormalize"):
    with ad.edit(lm, ad.Knockout(layer=23, head=3, query=-1, key=9, mode=mode)):
        results[mode] = float((clean.values - ad.score(lm, prompt).values)[0])
    print(f"{mode:<12} effect {results[mode]:.2f} of m = {float(clean.values[0]):.2f}")
assert float(ad.score(lm, prompt).values[0]) == float(clean.values[0])  # nothing stays behind

# %% [markdown]
# ## One replacement
#
# The same question about the token instead of one edge: the prompt's own counterfactual has " Mary" where the second
# " John" stands. All paths from that token are changed at once.

# %%
swapped = ad.explain(lm, prompt, method="replacement", replacement=ad.Replacement.pair())
frame = swapped.to_frame()
frame[frame["value"].notna()][["position", "position_label", "value", "unit"]].round(2)

# %% [markdown]
# ## Answer

# %%
sinks = table[table["key"].str.startswith("0 ")]
print(
    f"Head 3 gives the second ' John' {float(weight[3, 9]):.2f} of its weight, and it matters: without that one edge m falls "
    f"by {results['remove']:.2f} of {float(clean.values[0]):.2f}."
)
print(
    f"{len(sinks)} of {call.n_heads} heads have their largest weight on the first token, {sinks['weight'].mean():.2f} on average. It is "
    f"{sinks['share of contribution'].mean():.2f} of what they write, and no such edge moves m by more than "
    f"{sinks['effect'].abs().max():.2f}."
)
