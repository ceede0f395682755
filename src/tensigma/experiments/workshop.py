"""Models, statistics, compressed networks and accuracies for experiments, each made once and kept in a folder.

What is kept is found again by what it was made from: statistics by the names of model and data, solutions of layers by
their content (:class:`~tensigma.solving.Solutions`), accuracies and fine-tuned weights by the parameters of the
network. So experiments share whatever they have in common, and a killed run loses one piece of work.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tensigma.calibration import Calibration, calibrate
from tensigma.compression import Report
from tensigma.deployment import load, save
from tensigma.errors import InputError
from tensigma.experiments.hits import pack_hits
from tensigma.experiments.settings import ModelSettings
from tensigma.experiments.training import train
from tensigma.files import whole_file
from tensigma.layers import find_layers
from tensigma.running import Digest, answered, right, weights_digest
from tensigma.zoo import Data, load_data, load_model

BATCH = 50
# Images that are read for one evaluation are kept in memory for the next, up to so many bytes.
_KEPT = 1_000_000_000
_QUICK_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Models, weights and data of the user's own in place of those in a config, by name or pattern."""

    models: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)


class Workshop:
    """Where experiments get what they need.

    Args:
        data: The folder that ``{data}`` stands for.
        cache: The folder of what was made before.
        limit: At most so many images of any set.
    """

    def __init__(
        self,
        data: Path | None,
        cache: Path,
        *,
        overrides: Overrides | None = None,
        limit: int | None = None,
        device: torch.device | None = None,
        report: Callable[[Any], None] | None = None,
    ) -> None:
        self.folder, self.cache = data, cache
        self.limit = limit
        self.overrides = overrides or Overrides()
        self.device = device
        self.report = report or (lambda state: None)
        self._models: dict[str, nn.Module] = {}
        self._stats: dict[str, Calibration] = {}
        self._batches: dict[str, list[Any]] = {}

    @property
    def solutions(self) -> Path:
        """The folder of solved layers."""
        return self.cache / "solutions"

    def spec_of(self, name: str, spec: str, seed: int) -> str:
        """The name of the data, with its folder and seed filled in."""
        return self._filled(_override(self.overrides.sources, name, spec), name, seed)

    def data(self, name: str, spec: str, *, seed: int = 0, batch_size: int = BATCH) -> Any:
        """The images of a source."""
        loaded = load_data(self.spec_of(name, spec, seed), batch_size=batch_size)
        return loaded.take(self.limit) if self.limit is not None and isinstance(loaded, Data) else loaded

    def model(self, name: str, settings: ModelSettings, sources: Mapping[str, str]) -> nn.Module:
        """A model with its weights, trained first where the config says so."""
        key = self._key(self._model_facts(name, settings, sources))
        if key not in self._models:
            spec, weights = self._names(name, settings)
            if weights is None and settings.train is not None:
                weights = self._trained(spec, settings, sources)
            if weights is not None and not Path(weights).is_file():
                raise InputError(f"{weights}: no weights of {settings.title} there; give --weights {name}=FILE")
            with torch.random.fork_rng():
                torch.manual_seed(0)
                found = load_model(self._filled(spec, name, 0), weights)
            self._models[key] = found if self.device is None else found.to(self.device)
        return self._models[key]

    def stats(
        self, model: str, settings: ModelSettings, sources: Mapping[str, str], source: str, *, seed: int, fisher: Any
    ) -> Calibration:
        """The statistics of a model on a source."""
        spec = self.spec_of(source, sources[source], seed)
        facts = {
            "model": self._model_facts(model, settings, sources),
            "data": _placeless(spec, self.folder),
            "limit": self.limit,
            "fisher": fisher,
        }
        key = self._key(facts)
        if key not in self._stats:
            folder = self.cache / "statistics" / key
            if folder.is_dir():
                self._stats[key] = Calibration.load(folder)
            else:
                network = self.model(model, settings, sources)
                batches = self.data(source, sources[source], seed=seed)
                found = calibrate(
                    network,
                    batches,
                    max_samples=self.limit,
                    fisher=fisher,
                    seed=seed,
                    data_name=_placeless(spec, self.folder),
                    progress=self.report,
                )
                # Another process may have written the same in the meantime.
                found.save(folder, force=True)
                # From disk again: layers are then read when they are needed, and memory is free in between.
                self._stats[key] = Calibration.load(folder)
        return self._stats[key]

    def hits(self, model: nn.Module, source: str, spec: str) -> str:
        """Which images of a source the model gets right, packed."""
        facts = self.facts_of(source, spec)
        made = self.kept("hits", [facts, state_hash(model)], lambda: {"hits": self.count_hits(model, source, spec)})
        return made["hits"]

    def facts_of(self, source: str, spec: str) -> dict[str, Any]:
        """The images of an evaluation, as what a result depends on."""
        return {"data": _placeless(self.spec_of(source, spec, 0), self.folder), "limit": self.limit}

    def kept(self, kind: str, facts: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A small result under the hash of what it was made from."""
        file = self.cache / kind / f"{self._key(facts)}.json"
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
        made = make()
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as partial:
            partial.write_text(json.dumps(made), encoding="utf-8")
        return made

    def kept_weights(self, kind: str, facts: Any, model: nn.Module, make: Callable[[], tuple[nn.Module, Any]]) -> Any:
        """``model`` takes the weights that ``make`` finds for it; returned is what else it found, plain data."""
        file = self.cache / kind / f"{self._key([facts, state_hash(model)])}.safetensors"
        notes = file.with_suffix(".json")
        if not file.is_file() or not notes.is_file():
            made, found = make()
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(notes) as partial:
                partial.write_text(json.dumps(found), encoding="utf-8")
            with whole_file(file) as partial:
                save_file({key: value.cpu().contiguous() for key, value in made.state_dict().items()}, partial)
        model.load_state_dict(load_file(file))
        return json.loads(notes.read_text(encoding="utf-8"))

    def compressed(
        self, facts: Any, model: nn.Module, make: Callable[[], tuple[nn.Module, Report]]
    ) -> tuple[nn.Module, Report]:
        """The compressed copy of ``model`` that ``make`` makes, and its report."""
        folder = self.cache / "compressed" / self._key([facts, state_hash(model)])
        notes = folder.with_suffix(".json")
        if not folder.is_dir() or not notes.is_file():
            small, report = make()
            folder.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(notes) as partial:
                partial.write_text(json.dumps(report.to_json()), encoding="utf-8")
            # Another process may have written the same in the meantime.
            save(small, folder, force=True)
        return load(folder, model), Report.from_json(json.loads(notes.read_text(encoding="utf-8")))

    def batches(self, source: str, spec: str) -> Iterator[Any] | list[Any]:
        """The images of an evaluation, kept in memory where they are few."""
        key = self.spec_of(source, spec, 0)
        if key not in self._batches:
            data = self.data(source, spec, batch_size=100)
            first = next(iter(data))[0]
            n_samples = getattr(data, "n_samples", None)
            if n_samples is None or n_samples * first[0].numel() * 4 > _KEPT:
                return iter(data)
            self._batches.clear()
            self._batches[key] = list(data)
        return self._batches[key]

    def layers_of(self, model: nn.Module, layers: str) -> Any:
        """Which layers to compress: all that are asked for or, in the quick form, the first few of them."""
        if self.limit is None:
            return layers
        _, *rest = [(layer.name, layer.geometry) for layer in find_layers(model) if layer.geometry is not None]
        wanted = [name for name, geometry in rest if layers == "all" or not geometry.is_pointwise]
        return wanted[:1] + wanted[-2:] if layers == "all" else wanted[:_QUICK_LAYERS]

    def count_hits(self, model: nn.Module, source: str, spec: str) -> str:
        """Which images the model gets right, counted now."""
        return self.answers(model, source, spec)[0]

    @torch.inference_mode()
    def answers(self, model: nn.Module, source: str, spec: str) -> tuple[str, list[int]]:
        """Which images the model gets right, packed, and the class that it gives to each; −1 where it gives none."""
        # Thin layers run about twice as fast with channels last. A model that another runtime runs has none.
        network = model
        if next(model.parameters(), None) is not None:
            network = copy.deepcopy(model).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        hits: list[bool] = []
        answers: list[int] = []
        for images, labels in self.batches(source, spec):
            if labels is None:
                raise InputError(f"{source}: accuracy needs labels, which {spec} does not have")
            scores = network(images.to(self.device or images.device, memory_format=torch.channels_last))
            hits += right(scores, labels).tolist()
            answers += torch.where(answered(scores), scores.argmax(1), -1).tolist()
            if self.limit is not None and len(hits) >= self.limit:
                break
        return pack_hits(hits), answers

    def _trained(self, spec: str, settings: ModelSettings, sources: Mapping[str, str]) -> str:
        training = settings.train
        assert training is not None
        source = self.spec_of(training.source, sources[training.source], 0)
        facts = [spec, asdict(training), _placeless(source, self.folder), self.limit]
        file = self.cache / "trained" / f"{self._key(facts)}.safetensors"
        if not file.is_file():
            data = self.data(training.source, sources[training.source], batch_size=500)
            model = train(spec, data, training, report=self.report)
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as partial:
                save_file(model.state_dict(), partial)
        return str(file)

    def _names(self, name: str, settings: ModelSettings) -> tuple[str, str | None]:
        """Model and weights, the user's own before those of the config."""
        spec = _override(self.overrides.models, name, settings.spec)
        usual = settings.weights if spec == settings.spec else None
        weights = _override(self.overrides.weights, name, usual)
        return spec, None if weights is None else self._filled(weights, name, 0)

    def _model_facts(self, name: str, settings: ModelSettings, sources: Mapping[str, str]) -> Any:
        spec, weights = self._names(name, settings)
        if weights is not None:
            file = Path(weights)
            stamp = [file.stat().st_size, file.stat().st_mtime_ns] if file.is_file() else None
            return [spec, _placeless(weights, self.folder), stamp]
        training = None if settings.train is None else [asdict(settings.train), sources[settings.train.source]]
        return [spec, training, self.limit if training else None]

    def _filled(self, text: str, name: str, seed: int) -> str:
        if "{data}" in text and self.folder is None:
            raise InputError(f"{name}: {text} lies in the folder of models and images; name it with --data DIR")
        return text.replace("{data}", str(self.folder)).replace("{seed}", str(seed))

    @staticmethod
    def _key(facts: Any) -> str:
        return Digest().add(facts).text


def state_hash(model: nn.Module) -> str:
    """A hash of all parameters and buffers of a model and of its structure."""
    return Digest().add([str(model), weights_digest(model)]).text


def _override(table: Mapping[str, str], name: str, usual: Any) -> Any:
    """The last entry whose pattern matches."""
    found = [value for pattern, value in table.items() if fnmatchcase(name, pattern)]
    return found[-1] if found else usual


def _placeless(text: str, folder: Path | None) -> str:
    """A name without the folder that differs from machine to machine."""
    return text if folder is None else text.replace(str(folder), "{data}")
