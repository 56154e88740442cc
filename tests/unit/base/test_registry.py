from collections import OrderedDict

import pytest

from octavo.base import registry
from octavo.base.errors import ConfigError
from octavo.base.registry import Registry, load_object


@pytest.fixture
def mappings():
    return Registry("mapping", {"ordered": "collections:OrderedDict", "gone": "no_such_module:Thing"})


def test_loads_by_name_on_first_use(mappings):
    assert mappings.load("ordered") is OrderedDict
    assert "ordered" in mappings
    assert "other" not in mappings
    assert mappings.names() == ["gone", "ordered"]


def test_unknown_names_list_the_known(mappings):
    with pytest.raises(ConfigError, match=r"Unknown mapping 'other'\. Known: gone, ordered\."):
        mappings.load("other")


def test_a_broken_entry_is_not_hidden(mappings):
    with pytest.raises(ModuleNotFoundError):
        mappings.load("gone")
    with pytest.raises(AttributeError):
        load_object("collections:NoSuchThing")


def test_entries_can_be_added_and_registries_share_nothing(mappings):
    mappings.register("counter", "collections:Counter")
    assert "counter" in mappings
    assert "counter" not in Registry("mapping", {"ordered": "collections:OrderedDict"})


def test_plugins_run_by_entry_point(monkeypatch, mappings):
    class Entry:
        name = "mine"

        @staticmethod
        def load():
            return lambda: mappings.register("plugged", "collections:deque")

    found = {"octavo.plugins": [Entry]}
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found.get(group, []))
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    registry.load_plugins()
    assert "plugged" not in mappings
    monkeypatch.setenv("VLLM_PLUGINS", "another,mine")
    registry.load_plugins()
    assert "plugged" in mappings
