"""Names of models and data as users write them: ``scheme:target?key=value``, ``file.py:factory`` or ``file.onnx``."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any

from tensigma.errors import InputError, MissingExtra
from tensigma.zoo.torchvision_operators import import_torchvision, lacks_operators


@dataclass(frozen=True)
class Spec:
    """A parsed name.

    >>> Spec.parse("imagefolder:photos?size=96&classes=cat,dog")
    Spec(scheme='imagefolder', target='photos', options={'size': '96', 'classes': 'cat,dog'})
    >>> Spec.parse("models/mine.py:tiny")
    Spec(scheme='file', target='models/mine.py:tiny', options={})
    >>> Spec.parse("models/mine.onnx")
    Spec(scheme='onnx', target='models/mine.onnx', options={})
    """

    scheme: str
    target: str
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, kind: str = "model or data", schemes: Iterable[str] = ()) -> Spec:
        """Parse a name; raises :class:`InputError` if it does not have this form.

        ``kind`` and the accepted ``schemes`` appear in the error message.
        """
        head, mark, tail = text.strip().partition("?")
        options: dict[str, str] = {}
        for item in tail.split("&") if mark else ():
            key, equals, value = item.partition("=")
            if not equals or not key.strip():
                raise InputError(f"{text!r}: option {item!r} cannot be read; write options as ?key=value&key=value")
            if key.strip() in options:
                raise InputError(f"{text!r}: the option {key.strip()!r} is given twice; give it once")
            options[key.strip()] = value.strip()
        path, colon, _ = head.rpartition(":")
        if colon and path.endswith(".py"):
            return cls("file", head, options)
        if head.endswith(".onnx"):
            return cls("onnx", head, options)
        scheme, colon, target = head.partition(":")
        if not colon:
            raise _no_scheme(text, Path(head), kind, list(schemes))
        return cls(scheme.strip(), target.strip(), options)

    def __str__(self) -> str:
        head = self.target if self.scheme in ("file", "onnx") else f"{self.scheme}:{self.target}"
        tail = "&".join(f"{key}={value}" for key, value in self.options.items())
        return f"{head}?{tail}" if tail else head


def literal(text: str) -> Any:
    """An option's value as a number, boolean, None or, failing these, the text itself.

    >>> literal("3"), literal("0.5"), literal("true"), literal("none"), literal("bicubic")
    (3, 0.5, True, None, 'bicubic')
    """
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def unknown(what: str, name: str, accepted: Iterable[str]) -> InputError:
    """The error for an unknown name, with the names closest to it, or all if there are few."""
    names = sorted(accepted)
    similar = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    # A name that goes on where the given one stops is nearer than one that differs within it.
    close = sorted(similar, key=lambda each: not each.startswith(name))
    if len(names) > 12 and not close:
        return InputError(f"{what} {name!r} is not known, and none of the {len(names)} known names is close to it")
    listed = ", ".join(close if len(names) > 12 else names)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    return InputError(f"{what} {name!r} is not known{guess} ({'close' if len(names) > 12 else 'known'}: {listed})")


def _no_scheme(text: str, path: Path, kind: str, schemes: list[str]) -> InputError:
    """The error for a name without a scheme; it suggests a file or folder of that name."""
    if path.suffix == ".py":
        if not path.is_file():
            return InputError(f"{path}: no such file; the form is path/to/file.py:factory")
        return InputError(f"{text!r} lacks the name of the function; write {path}:NAME ({_defined(path)})")
    guess = None
    if "imagefolder" in schemes and path.expanduser().is_dir():
        guess = f"imagefolder:{text}"
    elif "npz" in schemes and path.suffix == ".npz":
        guess = f"npz:{text}"
    if guess is not None:
        return InputError(f"{text!r} is a path without the kind of {kind} before it; did you mean {guess!r}?")
    forms = f" ({kind}: {', '.join(_forms(schemes))})" if schemes else ""
    return InputError(f"{text!r} is not a name; write SCHEME:NAME or path/to/file.py:factory{forms}")


def _forms(schemes: Iterable[str]) -> list[str]:
    paths = {"file": "path/to/file.py:factory", "onnx": "path/to/model.onnx"}
    return [paths.get(scheme, f"{scheme}:…") for scheme in schemes]


def _functions(path: Path) -> list[str]:
    """Functions and classes that a file itself defines; it is read, not executed."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def _defined(path: Path) -> str:
    return f"it defines: {', '.join(_functions(path))}" if _functions(path) else "it defines no function"


def unknown_scheme(kind: str, text: str, scheme: str, schemes: Iterable[str]) -> InputError:
    """The error for a name with an unknown scheme."""
    forms = _forms(schemes)
    close = difflib.get_close_matches(f"{scheme}:…", forms, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    return InputError(f"{text!r} names no {kind}{guess} (accepted: {', '.join(forms)})")


def require(package: str, extra: str, wanted_for: str) -> ModuleType:
    """Import an optional package, or say which extra installs it."""
    # Only some builds of torch and torchvision fit together, and pip alone does not know which.
    install = f"pip install {'-c constraints.txt ' if extra == 'vision' else ''}'tensigma[{extra}]'"
    try:
        if package in ("torchvision", "timm"):  # timm imports torchvision
            import_torchvision()
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"{wanted_for} needs {package}, which is not installed; run: {install}") from error
    except (ImportError, RuntimeError) as error:
        raise MissingExtra(
            f"{wanted_for} needs {package}, which is installed but cannot be imported ({error}); "
            f"install builds that belong together: {install}"
        ) from error


def _execute(loader: Loader, module: ModuleType) -> None:
    """Execute a file, once more if torchvision could be imported only with stand-ins for its operators."""
    try:
        loader.exec_module(module)
    except RuntimeError as error:
        if not lacks_operators(error):
            raise
        import_torchvision()
        loader.exec_module(module)


def call_factory(spec: Spec, **options: Any) -> Any:
    """What ``path/to/file.py:factory`` returns; the file is executed, as ``python file.py`` would."""
    path_text, _, name = spec.target.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise InputError(f"{path}: no such file; the form is path/to/file.py:factory")
    module_spec = importlib.util.spec_from_file_location(f"tensigma_user_{path.stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickling look a class's module up by name; siblings are imported as from a script.
    sys.modules[module_spec.name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        _execute(module_spec.loader, module)
        factory = getattr(module, name, None)
        if not callable(factory):
            if not _functions(path):
                raise InputError(f"{path} defines no function; write one called {name or 'build'!r}")
            raise unknown(f"{path}: the function", name, _functions(path))
        return factory(**options)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{spec} raised {type(error).__name__}: {error}") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
