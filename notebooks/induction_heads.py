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
# # Which heads are induction heads, and what are they worth?
#
# An induction head looks up what followed the last time: in `... A B ... A` it attends from the second `A` to `B`. This
# notebook finds such heads in a trained model, asks what the model loses without them, watches them form during a
# training run, and tests a name ("the head for repeated names") instead of assuming it.
#
# It needs a few minutes of CPU time. The model is installed from the package index on first use.

# %%
# %matplotlib inline
import attndiag as ad
from attndiag.explanations.relation_probe import probe_relation
from attndiag.reports.figure_style import style
from attndiag.reports.head_figures import draw_relation, draw_score_against_effect, draw_score_maps
from attndiag.reports.phase_change import draw_phase_change, lag_sentence, shipped_phase_change
from attndiag.runs.prompt_files import shipped_prompts

lm = ad.load("default", device="cpu")
lm.info.name, lm.info.architecture

# %% [markdown]
# ## Scores, beside what they are read against
#
# The probe is `[BOS] s s` with 50 random tokens, no token twice: whoever predicts the second copy has to look it up.
# The score of a head is the mass that second-copy queries put on the token after their own first occurrence. A head
# that spreads evenly would get the *baseline*; mass on position 0 is shown and not divided away.

# %%
table = ad.heads(lm, probes=["induction", "previous"], rows=8, ablate=3)
columns = ["layer", "head", "prefix_matching_score", "prefix_matching_score_baseline", "prefix_matching_score_sink_mass"]
table.top("prefix_matching_score", 6)[columns].round(3)

# %%
with style():
    maps = draw_score_maps(table)
maps

# %% [markdown]
# ## What they are worth
#
# A pattern says where a head looks, not whether the model uses it. So heads are taken away, one at a time and all above
# the threshold together (redundant heads hide each other), beside 20 random sets of the same size. The first copy, where
# nothing can be looked up, is the control. The second copy being easier than the first proves no induction head: it is so
# in a one-layer model too.

# %%
{name: round(table.facts[name], 2) for name in ("first_copy_loss", "second_copy_loss")}

# %%
sets = table.sets_frame()
sets[sets["name"] != "random"].assign(heads=lambda frame: frame["heads"].map(len)).round(2)

# %%
random_sets = sets[sets["name"] == "random"]
random_sets[["effect", "first_copy_effect"]].describe().round(3)

# %%
with style():
    effects = draw_score_against_effect(table)
effects

# %% [markdown]
# ## The phase change
#
# A two-layer attention-only model was trained for 900 steps; 37 checkpoints come with the package, and a control with one
# layer, trained on the same rows, in which induction heads cannot form. Every head of every checkpoint is scored and
# ablated here, in seconds.

# %%
change = shipped_phase_change()
print(lag_sentence(change))
with style():
    figure = draw_phase_change(change)
figure

# %% [markdown]
# Copying eigenvalues are high long before the heads exist, and in the control: never a detector by themselves.

# %%
from attndiag.models.series import load_series

early = ad.heads(load_series().at(100), probes=["copying"])["copying_score"].values
control = ad.heads(load_series("control").at(900), probes=["copying"])["copying_score"].values
print("layer 1 at step 100:", early[1].numpy().round(2), " control at step 900:", control[0].numpy().round(2))

# %% [markdown]
# ## A name is a claim
#
# In "When Mary and **John** went to the store, **John** gave ..." some heads attend from the second name to the first.
# Is it the relation, or a distance? The related token is held against the best fixed offset (chosen afterwards on these
# very prompts) and against shuffled pairs; then the edge is knocked out.

# %%
relation = probe_relation(lm, shipped_prompts(), "subject_again", "subject", knock_out=3)
print(relation.facts["pairs"], "pairs from", relation.facts["clusters"], "template(s)")
columns = ["layer", "head", "relation_mass", "relation_mass_best_offset", "relation_mass_shuffled", "relation_p_any"]
relation.top("relation_mass", 5)[[*columns, "relation_effect", "relation_effect_shuffled"]].round(3)

# %%
with style():
    pairs = draw_relation(relation)
pairs
