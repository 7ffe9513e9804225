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
# # What does a contribution mean in each kind of attention, and what does each kind cost?
#
# Attention comes in many forms: heads that share keys and values, latent caches, windows, soft-caps, sinks, gates, and
# layers without any softmax. Here each form is one small random model of a real family, at the same width (64, four heads
# of 16, two layers) so that the numbers can be compared. What is measured is the mechanism, not the quality of a model.
#
# It needs less than a minute of CPU time and downloads nothing.

# %%
# %matplotlib inline
import warnings

import pandas as pd
import torch
from matplotlib import pyplot as plt
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, logging

import attndiag as ad
from attndiag.reports.figure_style import style

torch.set_num_threads(1)
logging.set_verbosity_error()
warnings.simplefilter("ignore")  # transformers, about configurations that nobody would train

# %%
base = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
grouped = {**base, "head_dim": 16, "num_key_value_heads": 2}
experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
hybrid = ["linear_attention", "full_attention"]
FORMS = {
    "multi-head": ("llama", {**grouped, "num_key_value_heads": 4}),
    "grouped-query": ("llama", grouped),
    "multi-query": ("llama", {**grouped, "num_key_value_heads": 1}),
    "latent (MLA)": ("deepseek_v3", {
        **base, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 2,
    }),
    "sliding window": ("mistral", {**grouped, "sliding_window": 8}),
    "alternating windows, soft-cap": ("gemma2", {**grouped, "sliding_window": 8, "attn_logit_softcapping": 6.0}),
    "sinks": ("gpt_oss", {**grouped, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "gated output, gated delta": ("qwen3_next", {
        **grouped, **experts, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": hybrid,
    }),
    "linear attention": ("minimax", {
        **grouped, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8, "layer_types": hybrid,
    }),
    "state space": ("mamba2", {
        "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "num_heads": 8, "head_dim": 16,
        "n_groups": 2, "chunk_size": 8, "expand": 2,
    }),
}  # fmt: skip


def build(family, settings):
    """A random model of the family, its weights widened so that attention is not uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(6)
    return model.eval()


def shown(table, formats):
    """A table with numbers as they are meant to be read."""
    formatted = table.assign(**{name: table[name].map(form.format) for name, form in formats.items()})
    return formatted.astype(object).fillna("")


models = {form: build(*choice) for form, choice in FORMS.items()}
ids = torch.randint(2, 60, (1, 256), generator=torch.Generator().manual_seed(0))

# %% [markdown]
# ## What each layer is
#
# Read off one probing forward, not off the configuration: `card` watches the tensors that reach the attention function
# and asks it which keys it lets through.

# %%
cards = {form: ad.card(model) for form, model in models.items()}
facts = [
    {
        "form": form, "layer": layer.layer, "kind": layer.kind, "class": layer.module_class, "heads": layer.query_heads,
        "kv heads": layer.kv_heads, "mask": layer.mask, "soft-cap": layer.softcap, "sinks": layer.sinks,
        "certified": layer.certified,
    }
    for form, card in cards.items() for layer in card.layers
]  # fmt: skip
shown(pd.DataFrame(facts, dtype=object).set_index(["form", "layer"]), {})

# %% [markdown]
# ## What each costs
#
# Cache: bytes for every further token while no window is full, and bytes of state that do not grow (float32, both layers
# together). FLOPs: matrix products
# of the token-mixing modules, per token and layer, on 64 and on 256 tokens. A softmax pays for every key, so its cost per
# token grows with length; a recurrence does not, apart from chunks.
#
# Two things that the table does not flatter: a window saves nothing here because this kernel computes the whole square
# and masks it afterwards, and elementwise work (most of a scan) is not counted as a matrix product.

# %%
def flops_per_token(model, length):
    """By mixing module: FLOPs of matrix products, per token."""
    with FlopCounterMode(display=False, depth=8) as counter, torch.no_grad():
        model(ids[:, :length])
    counts = counter.get_flop_counts()
    ends = ("self_attn", "linear_attn", "mixer")
    return {name: sum(found.values()) / length for name, found in counts.items() if name.endswith(ends)}


costs = []
for form, model in models.items():
    short, long = flops_per_token(model, 64), flops_per_token(model, 256)
    for (name, few), many, layer in zip(short.items(), long.values(), cards[form].layers, strict=True):
        costs.append({
            "form": form, "layer": layer.layer, "kind": layer.kind,
            "cache bytes a token": cards[form].cache_bytes_per_token, "fixed bytes": cards[form].cache_bytes_fixed,
            "FLOPs a token, n=64": round(few), "n=256": round(many), "growth": round(many / few, 2),
        })  # fmt: skip
costs = pd.DataFrame(costs).set_index(["form", "layer"])
costs

# %% [markdown]
# ## What a contribution is
#
# For any softmax layer the output is a sum over keys, $o_i = \sum_j T_{ij} + b_O$ with
# $T_{ij} = \sum_h A_{ij}^h v_j^h W_O^h$, and the contribution of key j is $\lVert T_{ij} \rVert$. Shared keys, latent
# caches, windows and soft-caps change how A and v come about and leave this sum alone. Sinks let rows of A sum to less
# than 1. An output gate multiplies z before $W_O$ and depends on the query: each T is gated by its own query, so the fast
# form is not valid there. Here all parts are summed one by one. The column *misses* is how far the parts are from the module's real output,
# relative to its size; *other top key*: queries for which the key with the largest weight (mean over heads) is not the
# one that writes most.

# %%
meaning = []
for form, model in models.items():
    if all(layer.kind == "mixer" for layer in cards[form].layers):
        continue
    with torch.no_grad(), ad.capture(model) as captured:
        model(ids)
    for call in captured.calls:
        weight, contribution = ad.contributions(call, "weight"), ad.contributions(call, "contribution", "reference")
        mean = weight.values.mean(1)
        meaning.append({
            "form": form, "layer": call.layer, "verified": contribution.verified,
            "misses": contribution.checks["completeness_error"],
            "row sum of A": mean.sum(-1).mean().item(),
            "other top key": (mean.argmax(-1) != contribution.values.argmax(-1)).float().mean().item(),
            "tanh bound": call.softcap,
        })  # fmt: skip
meaning = pd.DataFrame(meaning).set_index(["form", "layer"])
shown(meaning, {"misses": "{:.0e}", "row sum of A": "{:.3f}", "other top key": "{:.0%}"})

# %% [markdown]
# ## Layers without a softmax
#
# Linear attention, gated delta rules and state-space layers have no attention weights. What they do is still linear in
# their values, so pushing one value at a time through the layer gives the map that it implies. Its rows need not sum to 1
# and its entries may be negative: a share of attention it is not. Where a short convolution comes first, columns are
# positions behind it, not tokens. Norm and gate after the scan are frozen at what they were; without freezing them the
# parts do not add up to the output at all.

# %%
maps = {}
implied = []
for form in ("gated output, gated delta", "linear attention", "state space"):
    found, refused = ad.implied_maps(models[form], inputs={"input_ids": ids[:, :24]})
    assert not refused
    for each in found.values():
        maps.setdefault(form, each)
        implied.append({
            "form": form, "layer": each.layer, "columns": each.columns, "map misses the scan": each.core_error,
            "parts miss the output": each.output_error, "without freezing": each.unfrozen_error,
            "smallest row sum": each.row_sums.min().item(), "largest row sum": each.row_sums.max().item(),
            "negative": each.negative_share,
        })  # fmt: skip
implied = pd.DataFrame(implied).set_index(["form", "layer"])
shown(implied, {
    "map misses the scan": "{:.0e}", "parts miss the output": "{:.0e}", "without freezing": "{:.0%}",
    "smallest row sum": "{:.2f}", "largest row sum": "{:.2f}", "negative": "{:.0%}",
})  # fmt: skip

# %%
with torch.no_grad(), ad.capture(models["multi-head"]) as captured:
    models["multi-head"](ids[:, :24])
pictures = {"softmax": captured.calls[0].pattern[0, 0]}
pictures |= {form.removeprefix("gated output, "): each.head_map[0, 0] for form, each in maps.items()}
with style():
    figure, axes = plt.subplots(1, len(pictures), figsize=(9.2, 2.5), layout="constrained")
    for ax, (form, picture) in zip(axes, pictures.items(), strict=True):
        reach = picture.abs().max().item()
        drawn = ax.imshow(picture, cmap="PuOr_r", vmin=-reach, vmax=reach)
        ax.set_title(form, fontsize=8)
        ax.set_xlabel("key")
        figure.colorbar(drawn, ax=ax, shrink=0.75)
    axes[0].set_ylabel("query")
plt.show()

# %% [markdown]
# ## Answer

# %%
per_token = costs.groupby("form")["cache bytes a token"].first()
growth = costs.groupby("kind")["growth"]
softmax = meaning["misses"].max()
print(
    f"Contributions mean the same in all {len(meaning)} softmax layers: parts that sum to the real output to "
    f"{softmax:.0e}, gated output and sinks included ({int(meaning['verified'].sum())} of {len(meaning)} verified). "
    f"The key with the largest weight writes most for only {1 - meaning['other top key'].max():.0%} to "
    f"{1 - meaning['other top key'].min():.0%} of the queries.\n"
    f"With sinks the rows of A sum to {meaning.loc['sinks', 'row sum of A'].min():.3f} on average; everywhere else to "
    f"{meaning.drop('sinks')['row sum of A'].min():.3f}.\n"
    f"In {len(implied)} layers without a softmax there are no weights; the implied map reproduces the scan to "
    f"{implied['map misses the scan'].max():.0e} and, with norm and gate frozen, the output to "
    f"{implied['parts miss the output'].max():.0e} (without: off by {implied['without freezing'].min():.0%} and more); "
    f"{implied['negative'].min():.0%} to {implied['negative'].max():.0%} of it is negative.\n"
    f"A token costs {per_token['multi-head']} bytes of cache with one key/value head a query head, "
    f"{per_token['grouped-query']} with two, {per_token['multi-query']} with one, {per_token['latent (MLA)']} latent and "
    f"{per_token['state space']} in a state-space model (a fixed {cards['state space'].cache_bytes_fixed:,}).\n"
    f"From 64 to 256 tokens the matrix products per token grow {growth.min()['self']:.2f} to {growth.max()['self']:.2f} "
    f"times with a softmax and {growth.min()['mixer']:.2f} to {growth.max()['mixer']:.2f} times without."
)
