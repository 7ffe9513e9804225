"""Columns of the tables of a compared run, with type, unit and meaning."""

from __future__ import annotations

from collections.abc import Iterator

from attndiag.runs.schemas import Column, TableSchema

_RUN = Column("run", "string", "id of the run; joins every table to `runs`")
_PROMPT = Column("prompt", "string", "id of the prompt; joins to `prompts`")
_CLUSTER = Column("cluster", "string", "template of the prompt; statistics resample clusters")
_METHOD = Column("method", "string", "name of the method; `replacement[...]` for effects of replacing tokens")
_UNIT = Column("unit", "string", "unit of the number beside it")
_LAYER = Column("layer", "int32", "index of the block")
_HEAD = Column("head", "int32", "query head")
_VERDICT = Column(
    "verdict",
    "string",
    "`agree`, `disagree`, `inconclusive`, `replacement_dependent` or `undefined`, see docs/verdicts",
)
_COUNTS = tuple(
    Column(name, "int32", f"items with the verdict `{name}`")
    for name in ("agree", "disagree", "inconclusive", "replacement_dependent", "undefined")
)
_JUDGED = (
    _VERDICT,
    Column("claim", "string", "`high` from 2 / n of the method's mass, `low` up to 1 / (2 n), `none` between"),
    Column("share", "float64", "of the method's mass over the items judged together", "share"),
    Column("state", "string", "`present`, `absent`, `unsure`, `redundant`: what the intervention shows"),
    Column("effect", "float64", "m(clean) - m(edited), in `unit`"),
    Column("effect_low", "float64", "lower end of its interval, in `unit`"),
    Column("effect_high", "float64", "upper end, in `unit`"),
    Column("absent_below", "float64", "effects inside this margin are absent, in `unit`"),
    Column("present_from", "float64", "effects outside this margin are present, in `unit`"),
    _UNIT,
)
_WHOLE = (
    _METHOD,
    Column("about", "string", "`tokens` or `edges`: what was judged"),
    Column("verdict", "string", "`agree`, `disagree`, `inconclusive` or `undefined`, over all prompts"),
    Column("hit_rate", "float64", "right among the decided items that are claimed high or have an effect", "rate"),
    Column("hit_rate_low", "float64", "lower end of its 95 % interval over clusters", "rate"),
    Column("hit_rate_high", "float64", "upper end", "rate"),
    Column("p_chance", "float64", "chance of as many right minus wrong when claims are shuffled", "probability"),
    Column("weights_without_effect", "int32", "items claimed high whose effect is absent"),
    Column("effects_without_weight", "int32", "items claimed low whose effect is present"),
    *_COUNTS,
    Column("circular", "bool", "made by the replacement that gives the evidence"),
    Column("role", "string", "`ceiling`: the effects themselves, what a method can at best reach; else `method`"),
    Column("blocked", "int32", "prompts (edges: heads of prompts) whose verdicts a failed self-check blocked"),
)

_SCHEMAS = (
    TableSchema(
        "runs",
        "one row: what was run, on what, with what",
        (
            _RUN,
            Column("created", "string", "start of the first call, UTC, ISO 8601"),
            Column("status", "string", "`complete` or `unfinished`"),
            Column("model", "string", "as it was asked for"),
            Column("source", "string", "kind of place it was loaded from"),
            Column("location", "string", "where it was loaded from"),
            Column("revision", "string", "what pins the weights; null where nothing does"),
            Column("weights", "string", "fingerprint of the weights in memory"),
            Column("architecture", "string", "model class"),
            Column("parameters", "int64", "number of parameters, shared ones once"),
            Column("dtype", "string", "of most parameters"),
            Column("device", "string", "where inputs go"),
            Column("kernel", "string", "attention functions that ran"),
            Column("tokenizer_hash", "string", "of the tokenizer's definition"),
            Column("adds_bos", "bool", "encoding a text puts BOS in front"),
            Column("prompt_file", "string", "where the prompts came from; null for prompts that were passed"),
            Column("n_prompts", "int32", "prompts asked for"),
            Column("n_done", "int32", "prompts with a result, failed ones too"),
            Column("n_failed", "int32", "prompts that could not be measured"),
            Column("n_skipped", "int32", "entries of the prompt file that were left out"),
            Column("methods", "string", "names, JSON"),
            Column("replacements", "string", "names with parameters, JSON; the first gives the evidence"),
            Column("metrics", "string", "faithfulness metrics, JSON"),
            Column("edges", "string", "which edges were asked for"),
            Column("edges_measured", "float64", "share of the edges of the last queries measured exactly", "share"),
            Column("thresholds", "string", "of the verdicts, JSON"),
            Column("plan", "string", "everything that decides the numbers, JSON"),
            Column("deep", "bool", "made by the deep plan"),
            Column("seed", "int64", "of everything drawn"),
            Column("versions", "string", "of packages, JSON"),
            Column("workers", "int32", "processes that the last call asked for to measure prompts"),
            Column("threads", "int32", "of torch, in each of them"),
            Column("seconds", "float64", "time of all work, whenever it was done, workers added up", "s"),
            Column("seconds_by_method", "string", "the same by work, JSON", "s"),
            Column("notes", "string", "what was decided at loading, JSON"),
        ),
    ),
    TableSchema(
        "prompts",
        "one row a prompt, failed ones too",
        (
            _RUN,
            _PROMPT,
            _CLUSTER,
            Column("status", "string", "`ok` or `failed`"),
            Column("text", "string", "what the model reads"),
            Column("target_kind", "string", "what m is: `logit_diff`, `logprob`, ..."),
            Column("target", "string", "answer that m is about"),
            Column("foil", "string", "alternative that it is measured against; empty for none"),
            Column("m", "float64", "the target on the unedited prompt, in `unit`"),
            _UNIT,
            Column("noise_floor", "float64", "spread of m when only the batch changes, in `unit`"),
            Column("task", "string", "why the task check failed; empty where it passed"),
            Column("replacement_tau", "float64", "smallest agreement between replacements; null with one", "tau-b"),
            Column("tokens", "int32", "positions"),
            Column("admissible", "int32", "positions that are ranked"),
            Column("sinks", "int32", "admissible positions that are sinks"),
            Column("error", "string", "why it could not be measured; null where it could"),
        ),
    ),
    TableSchema(
        "tokens",
        "one row a token of a prompt",
        (
            _RUN,
            _PROMPT,
            Column("pos", "int32", "position in the real input_ids, from 0"),
            Column("token_id", "int64", "id in the vocabulary"),
            Column("text", "string", "characters that the token stands for"),
            Column("char_start", "int32", "first character in `prompts.text`; -1 for tokens without text"),
            Column("char_end", "int32", "one past the last character"),
            Column("is_special", "bool", "special or chat-template token, left out of rankings"),
        ),
    ),
    TableSchema(
        "scores",
        "one row a prompt, method and token; methods that failed on a prompt have one row with the reason",
        (
            _RUN,
            _PROMPT,
            _METHOD,
            Column("params", "string", "parameters of the method, JSON; null for none"),
            Column("target", "string", "what m is about"),
            Column("source_pos", "int32", "position of the token; null where the method failed"),
            Column("token", "string", "its text"),
            _UNIT,
            Column("value", "float64", "the score; null where undefined"),
            Column("signed", "bool", "whether the sign is about the target"),
            Column("admissible", "bool", "ranked and judged"),
            Column("sink", "bool", "draws mass whatever it says: set aside where agreement is measured"),
            Column("error", "string", "why there is no score"),
        ),
    ),
    TableSchema(
        "misleading",
        "how often the scores of edges mislead: one row a method and head, layer or prompt, and one for all prompts",
        (
            _RUN,
            _METHOD,
            Column(
                "by", "string", "`head`, `layer`, `prompt` (its heads), or `prompts`: those on which most heads mislead"
            ),
            _LAYER,
            _HEAD,
            _PROMPT,
            Column("misleads", "int32", "cases with the verdict `disagree`; a case is a head on a prompt, or a prompt"),
            Column("decided", "int32", "cases with `agree` or `disagree`"),
            Column("rate", "float64", "their share; null where none is decided", "rate"),
            Column(
                "low",
                "float64",
                "lower end of its 95 % interval; null for a single prompt and under 2 clusters",
                "rate",
            ),
            Column("high", "float64", "upper end", "rate"),
            Column("clusters", "int32", "clusters of prompts with a decided case"),
        ),
    ),
    TableSchema(
        "heads",
        "one row a head and measure, over the prompts and from probes",
        (
            _RUN,
            _LAYER,
            _HEAD,
            Column("measure", "string", "a column of `ComparedRun.heads`; `_low`, `_high`: ends of its 95 % interval"),
            _UNIT,
            Column("value", "float64", "the number; null where undefined or not measured"),
        ),
    ),
    TableSchema(
        "edges",
        "one row an edge and method: edges that are claimed high or whose effect is present. The others are many and "
        "easy, and left to the results",
        (
            _RUN,
            _PROMPT,
            _CLUSTER,
            _LAYER,
            _HEAD,
            Column("query_pos", "int32", "the query, at which the target is read"),
            Column("key_pos", "int32", "the key"),
            Column("token", "string", "text of the key"),
            _METHOD,
            Column("value", "float64", "what the method says, in `value_unit`"),
            Column("value_unit", "string", "unit of `value`"),
            *_JUDGED,
            Column("estimate", "float64", "first-order estimate of the effect, in `unit`"),
            Column("mass_kept", "float64", "share of the row's mass that the kept edges of this row hold", "share"),
            Column("complete", "bool", "every edge of the row was measured exactly"),
        ),
    ),
    TableSchema(
        "agreement",
        "one row a prompt, pair of methods and measure",
        (
            _RUN,
            _PROMPT,
            _CLUSTER,
            Column("first", "string", "a method"),
            Column("second", "string", "another"),
            Column("measure", "string", "of agreement"),
            Column("parameter", "float64", "of the measure (k, p); null for none"),
            Column("value", "float64", "null where undefined", "see the measure"),
            Column("adjusted", "float64", "0 by chance, 1 for equal lists; null where that has no meaning"),
            Column("null_low", "float64", "lower end of the middle 95 % of chance"),
            Column("null_high", "float64", "upper end"),
            Column("p", "float64", "chance of a value as extreme", "probability"),
            Column("items", "int32", "tokens compared"),
            Column("ranked_by", "string", "`value` or `magnitude`"),
            Column("undefined", "string", "why there is no value; empty where there is one"),
        ),
    ),
    TableSchema(
        "faithfulness",
        "one row a prompt, method and metric",
        (
            _RUN,
            _PROMPT,
            _CLUSTER,
            _METHOD,
            Column("metric", "string", "its name names the replacement"),
            Column("value", "float64", "null where undefined, in `unit`"),
            Column("low", "float64", "lower end of its interval, where it has one"),
            Column("high", "float64", "upper end"),
            Column("direction", "string", "whether higher or lower is better"),
            _UNIT,
            Column("control", "bool", "a control: random orders, recency, token frequency"),
            Column("circular", "bool", "the method was made by the replacement of the metric"),
            Column("undefined", "string", "why there is no value; empty where there is one"),
        ),
    ),
    TableSchema(
        "differences",
        "paired differences of methods over the prompts of one unit, by metric, corrected by Holm within both",
        (
            _RUN,
            Column("metric", "string", "as in `faithfulness`"),
            Column("first", "string", "a method"),
            Column("second", "string", "another, or the random orders"),
            Column("difference", "float64", "mean of first minus second, in `unit`"),
            Column("low", "float64", "lower end of its 95 % interval over clusters"),
            Column("high", "float64", "upper end"),
            Column("p", "float64", "sign-flip permutation", "probability"),
            Column("p_holm", "float64", "corrected", "probability"),
            Column("direction", "string", "whether higher or lower is better"),
            _UNIT,
            Column("clusters", "int32", "behind the interval"),
            Column("enough_clusters", "bool", "at least 12"),
            Column("undefined_share", "float64", "prompts without a difference", "share"),
            Column("primary", "bool", "the main question"),
            Column("circular", "bool", "one of the two was made by the replacement of the metric"),
        ),
    ),
    TableSchema(
        "verdicts",
        "one row a prompt, method and token",
        (
            _RUN,
            _PROMPT,
            _METHOD,
            Column("pos", "int32", "position of the token"),
            Column("token", "string", "its text"),
            *_JUDGED,
            Column("p_present", "float64", "of an effect beyond the margin, corrected over all tokens", "probability"),
            Column("p_absent", "float64", "of an effect inside the margin, corrected", "probability"),
            Column("reason", "string", "why the prompt has no verdict; empty where it has"),
            Column("blocked", "bool", "a failed self-check is that reason"),
        ),
    ),
    TableSchema("methods", "one row a method and kind of item: its verdict over all prompts", (_RUN, *_WHOLE)),
    TableSchema(
        "checks",
        "one row a self-check",
        (
            _RUN,
            Column("check", "string", "what is checked"),
            Column("prompt", "string", "null for the model's own"),
            Column("passed", "bool", "how it came out"),
            Column("detail", "string", "what was found"),
        ),
    ),
    TableSchema(
        "problems",
        "one row a thing that could not be measured",
        (
            _RUN,
            _PROMPT,
            Column("method", "string", "empty: the whole prompt; `edges`: its edges; else a method"),
            Column("reason", "string", "why"),
        ),
    ),
    TableSchema(
        "timings",
        "wall times, apart from the results so that two runs can be compared for equality",
        (
            _RUN,
            Column("prompt", "string", "null for what is done once"),
            Column("work", "string", "what took the time"),
            Column("seconds", "float64", "wall time", "s"),
        ),
    ),
)
COMPARED_TABLES: dict[str, TableSchema] = {schema.name: schema for schema in _SCHEMAS}


def describe_compared_columns() -> Iterator[dict[str, str]]:
    """Every column of every table, as rows of `columns.csv`."""
    for schema in COMPARED_TABLES.values():
        for column in schema.columns:
            yield {"table": schema.name, "name": column.name, "unit": column.unit, "meaning": column.meaning}
