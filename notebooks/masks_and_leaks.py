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
# # Would I notice a mask that leaks?
#
# A causal mask that is off by one lets every query read the token that it is asked to predict. Nothing crashes. This
# notebook trains two small models that differ in that one diagonal, looks at what a training curve shows and at what the
# models are worth, and then lets `attndiag.audit` look for this and eight other faults, and at a trained model.
#
# It needs about a minute of CPU time. The trained model is installed from the package index on first use.

# %%
# %matplotlib inline
import pandas as pd
import torch

import attndiag as ad
from attndiag.models.known import KNOWN_MODELS
from attndiag.models.known.twins import (
    MarkovLanguage,
    free_running_loss,
    generate,
    judge_text,
    teacher_forced_loss,
    train_twin,
)
from attndiag.reports.twin_figure import draw_twins

torch.set_num_threads(1)

# %% [markdown]
# ## Two twins
#
# The language is a Markov chain: each of 32 tokens has four possible successors, of probabilities .4, .3, .2 and .1. Its
# entropy is known, so "too good to be true" has a number. Both twins start from the same weights and see the same rows;
# in layer 0 of the leaky one the mask is `j <= i + 1` instead of `j <= i`.

# %%
language = MarkovLanguage(seed=0)
twins = {name: train_twin(language, leaky=name == "leaky") for name in ("sound", "leaky")}
held_out = language.rows(256, seed=7)
print(f"entropy of the language {language.entropy:.3f} nats a token, loss of a uniform guess {language.guess_loss:.3f}")

# %% [markdown]
# Two losses on the same held-out rows. *Teacher forced*: one forward of whole rows, as in training and as in most
# evaluations. *Free running*: the model is given what stands before a token and nothing else, as when it generates.

# %%
rows = {}
for name, (model, curve) in twins.items():
    text = judge_text(language, generate(model))
    rows[name] = {
        "last training loss": curve[-1],
        "teacher-forced loss": teacher_forced_loss(model, held_out),
        "free-running loss": free_running_loss(model, held_out),
        "valid steps": text.valid_rate,
        "repeated tokens": text.repetition_rate,
    }
text = judge_text(language, language.rows(64, seed=8))
rows["the language itself"] = {"valid steps": text.valid_rate, "repeated tokens": text.repetition_rate}
comparison = pd.DataFrame(rows).T
comparison.round(3)

# %%
curves = {
    name: (curve, rows[name]["teacher-forced loss"], rows[name]["free-running loss"])
    for name, (_, curve) in twins.items()
}
draw_twins(curves, language.entropy)

# %% [markdown]
# Judged by its training curve the leaky twin is the better model by far. It has learned to copy, not to predict: without
# a next token to copy it is worse than a uniform guess, and what it writes is one token over and over.

# %%
for name, (model, _) in twins.items():
    print(f"{name}:", *generate(model, rows=1, length=20, seed=3)[0].tolist())

# %% [markdown]
# The one thing in the curve that gives it away is the line that no honest model can cross. For natural language nobody
# knows where that line is.
#
# ## Asking by intervention
#
# `audit` changes a token and watches the outputs at positions that must not feel it. It needs no training and no
# knowledge of the language.

# %%
audits = {name: ad.audit(model) for name, (model, _) in twins.items()}
for name, found in audits.items():
    print(f"{name}:", "passed" if found.passed else "; ".join(str(finding) for finding in found.findings))

# %% [markdown]
# ## Other faults
#
# Nine small models with one planted fault each, and two sound ones. `future reach` is how many positions ahead an output
# can see; a fault that *vanishes when q, k and v are frozen* is not in the mask but in something before it.

# %%
planted = [
    "sound_llama", "sound_window", "future_leak", "hidden_diagonal", "inverted_mask", "padding_leak", "batch_leak",
    "wide_window", "upstream_mix", "missing_scale", "double_scale",
]  # fmt: skip
table = []
for name in planted:
    known = KNOWN_MODELS[name]()
    found = ad.audit(known.model)
    first = found.findings[0] if found.findings else None
    table.append({
        "planted": known.expected["fault"] or "nothing",
        "in layers": known.expected["faulty_layers"],
        "found": "nothing" if first is None else first.kind,
        "at": () if first is None else first.layers,
        "future reach": found.stack_reach[1],
        "vanishes when frozen": None if first is None else first.evidence.get("vanishes_when_frozen"),
    })
table = pd.DataFrame(table, index=planted)
table

# %% [markdown]
# ## A trained model
#
# The same questions to a model that is used in earnest: nothing to report. What was asked is part of the answer.

# %%
smollm = ad.audit(ad.load("default", device="cpu"))
pd.DataFrame([vars(check) for check in smollm.checks]).set_index("name")

# %% [markdown]
# ## Answer
#
# Not from the training curve, unless you happen to know the entropy of your data. From an intervention, at once:

# %%
named = int(((table["found"] != "nothing") == (table["planted"] != "nothing")).sum())
right = int((table["in layers"] == table["at"]).sum())
sound, leaky = rows["sound"], rows["leaky"]
print(
    f"The leaky twin trains to {leaky['teacher-forced loss']:.3f} nats, far below the entropy of {language.entropy:.3f}; "
    f"its sound twin to {sound['teacher-forced loss']:.3f}.\n"
    f"Free running, the leaky twin costs {leaky['free-running loss']:.2f} nats (a guess: {language.guess_loss:.2f}), the "
    f"sound one {sound['free-running loss']:.2f}; {leaky['valid steps']:.0%} against {sound['valid steps']:.0%} of what "
    "they write is in the language.\n"
    f"The audit reports {len(audits['leaky'].findings)} fault of the leaky twin, {audits['leaky'].findings[0].kind} in "
    f"layer {audits['leaky'].findings[0].layers[0]}, and {len(audits['sound'].findings)} of the sound one. "
    f"Of {len(table)} models with and without planted faults it calls {named} rightly faulty or sound and names "
    f"the faulty layers in {right}.\n"
    f"SmolLM2: {len(smollm.findings)} findings in {len(smollm.checks)} checks."
)
