"""What the tables of a run look like: every column with its type, its unit and its meaning.

A table is *tidy*: one observation a row, the run's id in each, the unit beside each number (a `unit` column where rows
differ, else in the column's description, which Parquet files carry as field metadata and `columns.csv` as text).
A new table is one more entry in `TABLES`; writing, reading, merging and export need nothing else.

Glossary: *share*, a part of a row of scores divided by the sum of that row, in [0, 1]; *mass*, softmax weight; *sink*,
position 0 of the keys; *certified*, the capture reproduces what the model computed and the parts add up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from attndiag.errors import ShapeError

if TYPE_CHECKING:
    import pyarrow as pa

ColumnType = Literal["string", "int32", "int64", "float64", "bool"]
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Column:
    """One column. `unit` is empty for names, texts and counts, and for values whose unit is in the row."""

    name: str
    type: ColumnType
    meaning: str
    unit: str = ""


@dataclass(frozen=True)
class TableSchema:
    """One table: its columns in order."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    def arrow(self) -> pa.Schema:
        """The pyarrow schema, unit and meaning in the metadata of each field."""
        import pyarrow as pa

        types = {
            "string": pa.string(),
            "int32": pa.int32(),
            "int64": pa.int64(),
            "float64": pa.float64(),
            "bool": pa.bool_(),
        }
        fields = [pa.field(c.name, types[c.type], metadata=_metadata(c)) for c in self.columns]
        return pa.schema(fields, metadata={"table": self.name, "meaning": self.meaning})

    def table(self, columns: Mapping[str, Any]) -> pa.Table:
        """Columns -> pyarrow table of this schema.

        A list or one-dimensional array gives one value a row, anything else the same value for all rows; columns that
        are left out are null. nan becomes null: an undefined number, never 0.

        Raises
        ------
        ShapeError : a name that is not in the schema, or columns of different length.
        """
        import pyarrow as pa

        names = [column.name for column in self.columns]
        unknown = [name for name in columns if name not in names]
        if unknown:
            raise ShapeError(f"table {self.name!r} has no column {unknown[0]!r}; its columns are {', '.join(names)}")
        sizes = {name: len(value) for name, value in columns.items() if _is_column(value)}
        length = max(sizes.values(), default=1)
        wrong = next((name for name, size in sizes.items() if size != length), None)
        if wrong is not None:
            raise ShapeError(f"column {wrong!r} of table {self.name!r} has {sizes[wrong]} rows; expected {length}")
        schema = self.arrow()
        arrays = []
        for name in names:
            value = columns.get(name)
            whole = value if _is_column(value) else [value] * length
            arrays.append(pa.array(whole, type=schema.field(name).type, from_pandas=True))
        return pa.Table.from_arrays(arrays, schema=schema)

    def empty(self) -> pa.Table:
        """The table without rows."""
        return self.arrow().empty_table()


def _is_column(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray) and np.ndim(value) == 1


def _metadata(column: Column) -> dict[str, str]:
    return {"meaning": column.meaning, **({"unit": column.unit} if column.unit else {})}


_RUN = Column("run", "string", "id of the run; joins every table to `runs`")
_PROMPT = Column("prompt", "string", "id of the prompt; joins to `prompts`")
_LAYER = Column("layer", "int32", "index of the block in its stack; null where the module stands in none")
_MODULE = Column("module", "string", "name of the attention module")
_CALL_KIND = Column("kind", "string", "`self`, or `cross` where keys come from another sequence")
_CERTIFIED = Column("certified", "bool", "the numbers stand on a call whose certificate and completeness hold")
_ERROR = Column("error", "string", "why the value is missing; null where it is not")

RUNS = TableSchema(
    "runs",
    "one row: what was run, on what, with what",
    (
        _RUN,
        Column("created", "string", "start, UTC, ISO 8601"),
        Column("status", "string", "`complete`, or `unfinished` when the run was stopped"),
        Column("model", "string", "as it was asked for"),
        Column("source", "string", "kind of place it was loaded from"),
        Column("location", "string", "where it was loaded from"),
        Column("revision", "string", "what pins the weights; null where nothing does"),
        Column("weights", "string", "fingerprint of the weights, 16 hex digits"),
        Column("architecture", "string", "model class"),
        Column("parameters", "int64", "number of parameters, shared ones once"),
        Column("dtype", "string", "dtype of most parameters"),
        Column("device", "string", "where inputs went"),
        Column("kernel", "string", "attention functions that ran, comma-separated"),
        Column("backend", "string", "ways in which contributions were computed, comma-separated"),
        Column("tokenizer_hash", "string", "SHA-256 of the tokenizer's definition, 16 hex digits"),
        Column("adds_bos", "bool", "encoding a text puts a BOS token in front"),
        Column("prompt_file", "string", "where the prompts came from; null for prompts given as objects"),
        Column("prompt_hash", "string", "SHA-256 of all prompts, 16 hex digits"),
        Column("n_prompts", "int32", "prompts asked for"),
        Column("n_skipped", "int32", "entries of the prompt file that were skipped as unusable"),
        Column("methods", "string", "methods measured, comma-separated"),
        Column("params", "string", "settings of the run, JSON"),
        Column("seed", "int64", "seed of every draw; this report draws nothing"),
        Column("logits_equal", "bool", "outputs with and without capture were bit-equal (checked on the first prompt)"),
        Column("versions", "string", "package versions, JSON"),
        Column("threads", "int32", "CPU threads of torch"),
        Column("notes", "string", "what the loader decided on the way"),
        Column("seconds", "float64", "wall time, loading and rendering left out", "s"),
    ),
)

PROMPTS = TableSchema(
    "prompts",
    "one row a prompt: what was asked and whether the model gets it right",
    (
        _RUN,
        _PROMPT,
        Column("index", "int32", "position in the prompt set, from 0"),
        Column("cluster", "string", "template that the prompt was made from"),
        Column("text", "string", "as tokenised, after a chat template where one was used"),
        Column("status", "string", "`ok`, `no_target` (measured, target unusable) or `failed` (not measured)"),
        Column("error", "string", "why the prompt or its target could not be used"),
        Column("n_tokens", "int32", "length in tokens"),
        Column("target", "string", "answer"),
        Column("target_id", "int64", "token id that stands for the answer (its first)"),
        Column("foil", "string", "alternative that it is measured against"),
        Column("foil_id", "int64", "token id that stands for the alternative"),
        Column("top1", "string", "the model's own most probable next token"),
        Column("top1_id", "int64", "its id"),
        Column("top1_prob", "float64", "its probability", "mass"),
        Column("target_prob", "float64", "probability of the answer's token", "mass"),
        Column("target_logprob", "float64", "log-probability of the answer's token", "nats"),
        Column("logit_diff", "float64", "logit of the answer minus logit of the foil", "logits"),
        Column("target_is_top1", "bool", "the answer's token is the model's top-1"),
        Column("task_ok", "bool", "target is top-1 and beats the foil; null without a target"),
        Column("n_calls", "int32", "attention calls captured"),
        Column("n_certified", "int32", "of those, certified"),
        Column("transient", "bool", "failed for lack of memory: the next run into this folder tries it again"),
    ),
)

TOKENS = TableSchema(
    "tokens",
    "one row a token of the real input",
    (
        _RUN,
        _PROMPT,
        Column("part", "string", "`input`, or `decoder` for the decoder's side of an encoder-decoder"),
        Column("pos", "int32", "position in the real input_ids, from 0"),
        Column("token_id", "int64", "id in the vocabulary"),
        Column("text", "string", "characters that the token stands for; its name for special tokens"),
        Column("char_start", "int32", "first character in `prompts.text`; null for tokens without text"),
        Column("char_end", "int32", "one past the last character"),
        Column("is_special", "bool", "special or chat-template token, left out of rankings"),
    ),
)

SCORES = TableSchema(
    "scores",
    "one row a number given to a source token by a method: what the last query receives, by layer, and the rows of "
    "single heads behind `disagreements`",
    (
        _RUN,
        _PROMPT,
        Column("method", "string", "catalogue name of the method"),
        Column("params", "string", "parameters of the method and how heads were joined, JSON; null for none"),
        Column("target", "string", "what signed scores are about; null for methods without a target"),
        Column("source_pos", "int32", "the key: position of the token that is read"),
        Column("query_pos", "int32", "the query; null where the score is not about one"),
        _LAYER,
        _MODULE,
        Column("head", "int32", "query head; null where heads were joined"),
        Column("unit", "string", "unit of `value`"),
        Column("value", "float64", "the score; null where undefined"),
        _CERTIFIED,
        _ERROR,
    ),
)

HEADS = TableSchema(
    "heads",
    "one row a measure of one head (or of a whole layer: `head` null) on one prompt",
    (
        _RUN,
        _PROMPT,
        _LAYER,
        _MODULE,
        _CALL_KIND,
        Column("head", "int32", "query head; null for a measure of the whole layer"),
        Column("measure", "string", "name of the measure; `measures.csv` lists them with unit and direction"),
        Column("unit", "string", "unit of `value`"),
        Column("value", "float64", "the number; null where undefined"),
        Column("n", "int32", "rows (queries, keys) that it is an average of"),
        Column("undefined", "int32", "rows left out because the number is undefined there"),
        _CERTIFIED,
        _ERROR,
    ),
)

DISAGREEMENTS = TableSchema(
    "disagreements",
    "the pairs of one prompt on which weight and head contribution differ most, at most one a head and direction",
    (
        _RUN,
        _PROMPT,
        Column("direction", "string", "`contribution_over_weight` or `weight_over_contribution`"),
        Column("key_class", "string", "`content`, or `sink` for position 0, other sink keys and special tokens"),
        Column("rank", "int32", "within prompt, direction and class, from 1"),
        _LAYER,
        _MODULE,
        _CALL_KIND,
        Column("head", "int32", "query head"),
        Column("query_pos", "int32", "the query"),
        Column("query_token", "string", "its text"),
        Column("key_pos", "int32", "the key"),
        Column("key_token", "string", "its text"),
        Column("weight", "float64", "A_ij", "mass"),
        Column("head_contribution", "float64", "A_ij ||f_j||", "residual norm"),
        Column("row_written", "float64", "sum_j A_ij ||f_j||, what the shares are shares of", "residual norm"),
        Column("weight_share", "float64", "A_ij / sum_j A_ij", "share"),
        Column("contribution_share", "float64", "A_ij ||f_j|| / sum_j A_ij ||f_j||", "share"),
        Column("difference", "float64", "contribution_share - weight_share", "share"),
        _CERTIFIED,
    ),
)

CHECKS = TableSchema(
    "checks",
    "one row an attention call: measured proof that what was captured is what the model used",
    (
        _RUN,
        _PROMPT,
        _LAYER,
        _MODULE,
        _CALL_KIND,
        Column("call_index", "int32", "how often the module had been called before in this forward"),
        Column("route", "string", "how the call was seen"),
        Column("kernel", "string", "function that computed it"),
        Column("backend", "string", "how its contributions were computed; null where they were not"),
        Column("value_error", "float64", "max |A v - z| over max |z|; smaller is better", "relative"),
        Column("formula_error", "float64", "the same with A recomputed from q and k", "relative"),
        Column("output_error", "float64", "max |z W_O + b_O - output| over max |output|", "relative"),
        Column("completeness_error", "float64", "||sum_j T_ij + b_O - o_i|| / ||o_i||, the largest row", "relative"),
        Column("tolerance", "float64", "what the errors are held against", "relative"),
        Column("rows", "int32", "query rows compared, of each head"),
        Column("excluded_rows", "int32", "rows left out: padding, or no key allowed"),
        _CERTIFIED,
        Column("failures", "string", "checks that failed, in words; null for none"),
        Column("not_measured", "string", "why contributions are missing for this call; null where they are not"),
    ),
)

REFUSALS = TableSchema(
    "refusals",
    "one row a layer that mixes tokens without softmax weights, so that nothing could be measured there",
    (
        _RUN,
        _PROMPT,
        _MODULE,
        Column("module_class", "string", "class of the module"),
        Column("reason", "string", "what it is"),
    ),
)

TIMINGS = TableSchema(
    "timings",
    "wall times, apart from the results so that two runs can be compared for equality",
    (
        _RUN,
        Column("prompt", "string", "id of the prompt; null for work that belongs to none"),
        Column("work", "string", "what took the time"),
        Column("seconds", "float64", "wall time", "s"),
    ),
)

TABLES: dict[str, TableSchema] = {
    schema.name: schema for schema in (RUNS, PROMPTS, TOKENS, SCORES, HEADS, DISAGREEMENTS, CHECKS, REFUSALS, TIMINGS)
}


def describe_columns() -> Iterator[dict[str, str]]:
    """Every column of every table, as rows of `columns.csv`."""
    for schema in TABLES.values():
        for column in schema.columns:
            yield {"table": schema.name, "name": column.name, "unit": column.unit, "meaning": column.meaning}


def require_table(name: str, known: Sequence[str] | Mapping[str, Any] = TABLES) -> TableSchema:
    """The schema of a table, or `ShapeError` naming those that exist."""
    if name not in known:
        raise ShapeError(f"there is no table {name!r}; known tables are {', '.join(known)}")
    return TABLES[name]
