"""The public faces: each family has the same set of names by role, and none defines anything."""

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest

import jaxattn
from jaxattn import gdn, mla
from tests.helpers.fresh_process import said_by_a_fresh_process

FAMILIES = ("mla", "gqa", "gdn", "kda")
# What a model needs of a family, by the names that serve it. Roles that a family has not are said.
ROLES = {
    "decode": {
        "mla": "mla_decode",
        "gqa": "gqa_decode",
        "gdn": "gated_delta_net_decode",
        "kda": "kimi_delta_attention_decode",
    },
    "prefill": {
        "mla": "mla_prefill",
        "gqa": "gqa_prefill",
        "gdn": "gated_delta_rule_prefill",
        "kda": "kda_prefill",
    },
    "cache or states": {
        "mla": "mla_cache_write",
        "gqa": "gqa_cache_write",
        "gdn": "state_write",
        "kda": "state_write",
    },
    "weights of a layer": {
        "mla": "pack_mla_weights",
        "gqa": "pack_gqa_weights",
        "gdn": "pack_gdn_weights",
        "kda": "pack_kda_weights",
    },
    "scratch": dict.fromkeys(FAMILIES, "scratch"),
    # States have no lengths, so a delta rule's decode has nothing to schedule.
    "schedule": {"mla": "decode_schedule", "gqa": "decode_schedule"},
}


@pytest.mark.parametrize("role", ROLES)
def test_a_family_has_its_part_of_each_role(role):
    for family, name in ROLES[role].items():
        assert callable(getattr(importlib.import_module(f"jaxattn.{family}"), name))


@pytest.mark.parametrize("family", [*FAMILIES, "moe", "nn"])
def test_a_face_defines_nothing(family):
    module = importlib.import_module(f"jaxattn.{family}")
    tree = ast.parse(Path(inspect.getfile(module)).read_text())
    doc, *rest = tree.body
    assert isinstance(doc, ast.Expr) and ast.get_docstring(tree)
    for node in rest:
        if isinstance(node, ast.Assign):  # of names that have gone
            assert ast.unparse(node).startswith("__getattr__ = _deprecation.renamed_names(")
            continue
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        assert all(alias.asname in (alias.name, f"_{alias.name}") for alias in node.names)


@pytest.mark.parametrize("family", [*FAMILIES, "moe"])
def test_each_name_says_what_it_is(family):
    module = importlib.import_module(f"jaxattn.{family}")
    names = [name for name in vars(module) if not name.startswith("_")]
    assert names
    for name in names:
        assert inspect.getdoc(getattr(module, name)), f"jaxattn.{family}.{name}"


def ops():
    for family in (*FAMILIES, "moe"):
        module = importlib.import_module(f"jaxattn.{family}")
        yield from ((name, op) for name, op in vars(module).items() if inspect.isfunction(op))


def test_what_a_call_may_leave_out_is_named():
    """docs/architecture.md says which parameters of an op are in groups, and which are not."""
    for name, op in ops():
        given = inspect.signature(op).parameters.values()
        required = [p for p in given if p.default is p.empty]
        assert len(required) <= 10, name
        assert len(given) <= 18, f"{name}: group what belongs together"
        if len(given) > 5:
            by_name = [p.kind is p.KEYWORD_ONLY for p in given if p.default is not p.empty]
            assert all(by_name), name


def test_two_parameters_that_need_each_other_are_one():
    """No field of a group is a parameter of an op beside it."""
    groups = {"checkpoints": gdn.Checkpoints, "output_norm": gdn.OutputNorm}
    seen = set()
    for name, op in ops():
        given = set(inspect.signature(op).parameters)
        for group in groups.keys() & given:
            fields = {f"{group}_{field.name}" for field in dataclasses.fields(groups[group])}
            assert not given & (fields | {"gate", "norm_weight", "checkpoint_indices"}), name
            seen.add(group)
    assert seen == groups.keys()


def test_what_is_public_at_the_top_is_its_family_s():
    for family in ("mla", "gdn"):
        module = importlib.import_module(f"jaxattn.{family}")
        for name in set(vars(module)) & set(dir(jaxattn)):
            if not name.startswith("_"):
                assert getattr(module, name) is getattr(jaxattn, name)


def test_every_name_at_the_top_is_typed_and_is_imported_when_it_is_used():
    """What a type checker reads are the names and the modules that a program gets."""
    tree = ast.parse(Path(inspect.getfile(jaxattn)).read_text())
    [typed] = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(typed.test) == "TYPE_CHECKING"
    lines = [(line.module, *line.names) for line in typed.body]
    assert all(name.name == name.asname for _, name in lines)
    assert [name.name for _, name in lines] == jaxattn.__all__
    for module, name in lines:
        found = getattr(jaxattn, name.name)
        assert found is getattr(importlib.import_module(module), name.name)
        assert name.name in dir(jaxattn) and vars(jaxattn)[name.name] is found
    assert jaxattn.models is importlib.import_module("jaxattn.models")
    with pytest.raises(AttributeError, match="module 'jaxattn' has no attribute 'mla_encode'"):
        _ = jaxattn.mla_encode
    assert not hasattr(jaxattn, "_none")


def test_an_op_is_imported_without_the_engine():
    assert said_by_a_fresh_process("imported with the package") == "False\njax\n"


@pytest.mark.parametrize(
    "old, new",
    [("Meeting", "ContextParallelMerge"), ("meeting_room", "merge_buffer_shape")],
)
def test_a_renamed_public_name_works_with_a_warning(old, new):
    with pytest.warns(DeprecationWarning, match=f"jaxattn.mla.{old} is now jaxattn.mla.{new}"):
        assert getattr(mla, old) is getattr(mla, new)


def test_the_older_name_of_context_parallel_decode_warns_and_names_the_new_one():
    with pytest.warns(DeprecationWarning, match="is now jaxattn.mla.mla_decode_context_parallel"):
        with pytest.raises(TypeError):
            mla.mla_decode_met(meeting=None)
    with pytest.raises(AttributeError, match="has no attribute 'mla_decode_never'"):
        _ = mla.mla_decode_never
