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
# # Can my checkpoint be measured, and are the numbers to be believed?
#
# Six questions to ask of a new model before any number of it is read. Shown on the default model, about a minute on one
# core; a hub id, a folder, a GGUF file or a model object works in its place: `ad.load("gpt2")`, `ad.load("path/to/folder")`,
# `ad.load(my_model, tokenizer=my_tokenizer)`.

# %%
from dataclasses import replace

import torch
from transformers import MambaConfig, MambaForCausalLM
from transformers.utils import logging

import attndiag as ad
from attndiag.errors import AttnDiagError
from attndiag.runs.memory import estimate_memory

logging.set_verbosity_error()
lm = ad.load("default", device="cpu")
prompt = ad.Prompt("When Mary and John went to the store, John gave a drink to", target=" Mary", foil=" John")
print(
    f"{lm.info.architecture}, {lm.info.dtype}, {lm.info.attn_implementation}, {lm.info.n_parameters / 1e6:.0f} M parameters"
)

# %% [markdown]
# ## 1. What does each layer compute?
#
# The card is measured on a probe, not read from the configuration; where the two differ, it says both.

# %%
card = ad.card(lm)
print(card.to_text())

# %% [markdown]
# ## 2. Are its masks and its scale sound?
#
# By intervention: does a token change outputs that it must not reach, does padding change anything, do scores saturate?

# %%
audit = ad.audit(lm)
print(audit)
for check in audit.checks:
    print(f"{check.name:<32} {check.state}")

# %% [markdown]
# ## 3. Is what was captured what the model used?
#
# Every call carries its errors: weights times values against what the kernel returned, the recorded formula against the
# same, the output projection against the module's own output.

# %%
with ad.capture(lm) as captured:
    lm.forward(prompt)
calls = captured.calls
worst = max(calls, key=lambda call: call.certificate.value_error).certificate
print(f"{sum(call.certificate.passed for call in calls)} of {len(calls)} calls certified")
print(f"largest error {worst.value_error:.0e} in {worst.module_name}, allowed {worst.tolerance:.0e}")

# %% [markdown]
# A record that does not reproduce the model is refused. Here one is spoilt on purpose: its scale is doubled.


# %%
def refusal(attempt):
    """The error that an attempt ends with, as a person reads it."""
    try:
        attempt()
    except AttnDiagError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")


spoilt = replace(calls[23], scale=calls[23].scale * 2)
print(refusal(spoilt.certificate.check))

# %% [markdown]
# ## 4. What does a refusal look like, and what then?
#
# Where a measurement is not defined, the answer is the reason and the nearest thing that is defined, never a number. A
# pre-norm block has no norm behind the sum with the residual, and a state space layer has no softmax at all.

# %%
print(refusal(lambda: ad.contributions(calls[23], "contribution_norm")))
after_next_norm = ad.contributions(calls[23], "contribution_norm", norm="next")
print(
    "what the text says to do:",
    after_next_norm.method,
    tuple(after_next_norm.values.shape),
    "verified:",
    after_next_norm.verified,
)

# %%
config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
mamba = MambaForCausalLM(config).eval()


def captured_mamba():
    with ad.capture(mamba):
        mamba(torch.arange(8)[None])


print(refusal(captured_mamba))

# %% [markdown]
# ## 5. Half precision, batches, padding
#
# In bf16 the certificate is held against four units in the last place of bf16, so it still tells rounding from a wrong
# formula. What rounding does to the answer is a question of its own.

# %%
half = ad.load("default", device="cpu", dtype="bfloat16")
with ad.capture(half) as captured:
    half.forward(prompt)
errors = [call.certificate for call in captured.calls]
full_m, half_m = (float(ad.score(model, prompt).values[0]) for model in (lm, half))
print(
    f"bf16: {sum(c.passed for c in errors)} of {len(errors)} certified, largest error {max(c.value_error for c in errors):.0e}, allowed {errors[0].tolerance:.0e}"
)
print(f"m = {full_m:.2f} in float32, {half_m:.2f} in bf16")
del half

# %% [markdown]
# In a batch the shorter prompt is padded. On the left, position ids are made so that nothing moves (and a trial run makes
# sure). Rows of padded queries are nan, never 0.

# %%
together = ["The capital of France is", prompt]
found = {}
for side in ("right", "left"):
    encoded = lm.encode(together, padding_side=side)
    with ad.capture(lm, layers=[23]) as captured:
        lm.run(encoded.inputs)
    weights = ad.contributions(captured.calls[0], "weight")
    last = int(encoded.attention_mask[0].nonzero()[-1])
    first = int(encoded.attention_mask[0].nonzero()[0])
    found[side] = weights.values[0, :, last, first : last + 1]
    padded = int((encoded.attention_mask == 0).sum())
    print(
        f"{side:<5} inputs {', '.join(encoded.inputs)}; {padded} padded rows are nan: {bool(weights.values[0, 0].isnan().all(-1).sum() == padded)}"
    )
difference = float((found["right"] - found["left"]).abs().max())
print(f"largest difference of a weight between the two sides: {difference:.0e}")

# %% [markdown]
# ## 6. Will it fit?
#
# The estimate is for a run of the report over a prompt of that length, beyond the weights of the model. Where full maps of
# [head, query, key] would not fit, the report streams over them instead, and says so.

# %%
for n in (256, 512, 1024, 2048):
    maps = estimate_memory(lm, n).needed / 1e9
    streamed = estimate_memory(lm, n, backend="streaming").needed / 1e9
    print(f"{n:>5} tokens: {maps:6.2f} GB with full maps, {streamed:5.2f} GB streamed")

# %% [markdown]
# ## Answer

# %%
print(
    f"{lm.info.name}: {len(card.layers)} of {len(card.layers)} layers have softmax attention, {len(audit.findings)} findings in "
    f"{len(audit.checks)} checks, every call certified to {worst.value_error:.0e}; in bf16 m moves by {abs(full_m - half_m):.2f}. "
    "It can be measured, and the numbers stand on its own outputs."
)
