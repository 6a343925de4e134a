"""Stands in for leptonai, which NeMo-Run imports for its Lepton executor and these tests never use: any name, any submodule."""

import importlib.abc
import importlib.machinery
import sys
import types


class _Module(types.ModuleType):
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        wanted = fullname.startswith("leptonai.")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
