"""Data sets by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tensigma.errors import InputError
from tensigma.zoo.batches import Data, FactoryData, Part
from tensigma.zoo.hf_datasets import Rows, open_rows
from tensigma.zoo.images import IMAGENET_MEAN, IMAGENET_STD, View
from tensigma.zoo.options import DataOptions
from tensigma.zoo.select import choose, share
from tensigma.zoo.shards import Shards, open_shards
from tensigma.zoo.sources import Arrays, Folder, Source, open_cifar10, open_cifar100, open_digits, open_folder, open_npz
from tensigma.zoo.spec import Spec, call_factory, literal, unknown_scheme
from tensigma.zoo.streams import Stream, StreamedRows, open_stream

logger = logging.getLogger(__name__)


def load_data(
    spec: str | Sequence[str], *, batch_size: int = 64, workers: int = 1, **options: Any
) -> Data | FactoryData:
    """The data of this name; several names, or names joined by `` + ``, make a mixture.

    | name | data |
    |---|---|
    | ``imagefolder:DIR`` | ``DIR/CLASS/*.jpg``, or images without classes; short side to 256, the central 224×224 |
    | ``cifar10:DIR`` | ``train*.npz`` and ``test*.npz``, or the binary version; ``split=test`` for the test set |
    | ``cifar100:DIR`` | the same for CIFAR-100 |
    | ``webdataset:FILE-{000..009}.tar`` | shards of the WebDataset form; classes from ``.cls`` members |
    | ``hf:PATH`` | Parquet files or a set of Hugging Face ``datasets``; ``split=test`` for a stored split |
    | ``npz:FILE`` | ``images`` (uint8, or float taken as already normalised) and ``labels``, if any |
    | ``digits:`` | scikit-learn's handwritten digits, 8×8, divided by 16 |
    | ``path/to/file.py:factory`` | the batches or ``Dataset`` it returns; options become its arguments |

    Options follow as ``?key=value&key=value``; as keywords they hold for every set that does not set them itself.

    | option | meaning |
    |---|---|
    | ``size=224`` | side of the square network input, cropped from the centre |
    | ``size=48x320`` | height and width of the network input; the whole image is stretched to it |
    | ``fit=pad`` | instead of stretching, keep proportions and put zeros right and below |
    | ``order=bgr`` | colours from blue to red; ``mean`` and ``std`` are in that order too |
    | ``layout=nhwc`` | channels last, as networks from TensorFlow take them |
    | ``resize=256`` | short side before the crop; for a folder 256/224 of ``size``, otherwise ``size`` |
    | ``via=32`` | down to this resolution, then up again: images as detailed as those of a low-resolution set |
    | ``interpolation=bicubic`` | or ``bilinear`` (default) |
    | ``mean=…&std=…`` | one number or one per channel; ImageNet's for colour images, 0 and 1 for others |
    | ``classes=cat,dog`` | these classes only, by name, number or range (``151-268``); labels keep their numbers |
    | ``samples=1000``, ``per_class=10`` | a random choice; a smaller one is part of a larger one with the same seed |
    | ``split=train&holdout=0.1`` | all but a random tenth, which ``split=val&holdout=0.1`` gives |
    | ``seed=0`` | of every random choice and of the order |
    | ``shuffle=false`` | stored order; by default the order is random, so that the first images are a fair sample |
    | ``weight=2`` | share of this set in a mixture, relative to the others (1); without weights all images are used |
    | ``column=image``, ``label=label`` | of shards and tables: the ending or column of images and of classes |
    | ``streaming=true`` | of tables: rows are read in turn and never stored, shuffled among 1,000 at a time |
    | ``unreadable=skip`` | leave out images that cannot be read, with a warning, instead of stopping |

    >>> data = load_data("digits:?classes=3,7&samples=100", batch_size=40)
    >>> *_, (images, _) = data
    >>> data.n_samples, data.n_classes, len(data), tuple(images.shape)
    (100, 10, 3, (20, 1, 8, 8))
    """
    texts = [spec] if isinstance(spec, str) else list(spec)
    specs = [Spec.parse(name, "data", (*_OPENERS, "file")) for text in texts for name in text.split(" + ")]
    if not specs:
        raise InputError("no data was named; give for example imagefolder:DIR")
    for parsed in specs:
        if parsed.scheme not in (*_OPENERS, "file"):
            raise unknown_scheme("data", str(parsed), parsed.scheme, (*_OPENERS, "file"))
    if any(parsed.scheme == "file" for parsed in specs):
        if len(specs) > 1:
            raise InputError("data from a file's function cannot be mixed by name; mix inside the function")
        return _from_file(specs[0], batch_size, options)
    given = [DataOptions.of(parsed, options) for parsed in specs]
    if any(option.streaming for option in given):
        if len(specs) > 1:
            raise InputError("a stream cannot be mixed with other data; leave streaming=true out")
        return _stream(specs[0], given[0], batch_size)
    opened = [_OPENERS[parsed.scheme](parsed, option) for parsed, option in zip(specs, given, strict=True)]
    settings = [option for _, _, option in opened]
    chosen = [choose(parsed, source, option) for parsed, (source, _, option) in zip(specs, opened, strict=True)]
    parts = [
        Part(str(parsed), source, _adjusted(view, option), option, indices)
        for parsed, (source, view, option), indices in zip(specs, opened, share(chosen, settings), strict=True)
    ]
    return Data(parts, batch_size=batch_size, workers=workers)


def _from_file(spec: Spec, batch_size: int, options: dict[str, Any]) -> FactoryData:
    arguments = options | {key: literal(value) for key, value in spec.options.items()}
    return FactoryData(str(spec), lambda: call_factory(spec, **arguments), batch_size=batch_size)


def _stream(spec: Spec, options: DataOptions, batch_size: int) -> FactoryData:
    if batch_size < 1:
        raise InputError(f"batch_size={batch_size!r} is invalid; give a whole number of at least 1")
    source = open_stream(spec.target, options)
    stream = Stream(
        source=source,
        view=_adjusted(_file_view(spec, options, source), options),
        batch_size=batch_size,
        skips=options.unreadable == "skip",
    )
    return FactoryData(str(spec), lambda: stream, batch_size=batch_size)


def _adjusted(view: View, options: DataOptions) -> View:
    """The default view of a set, with the options applied."""
    return replace(
        view,
        size=options.size or view.size,
        resize=options.resize or view.resize,
        via=options.via,
        interpolation=options.interpolation,
        shape=options.shape,
        fit=options.fit,
        order=options.order,
        layout=options.layout,
        mean=options.mean or view.mean,
        std=options.std or view.std,
    )


def _open_folder(spec: Spec, options: DataOptions) -> tuple[Source, View, DataOptions]:
    source = open_folder(Path(spec.target).expanduser())
    return source, _file_view(spec, options, source), options


def _open_shards(spec: Spec, options: DataOptions) -> tuple[Source, View, DataOptions]:
    source = open_shards(spec.target, options.column, options.label)
    return source, _file_view(spec, options, source), options


def _open_rows(spec: Spec, options: DataOptions) -> tuple[Source, View, DataOptions]:
    source = open_rows(spec.target, options.stored, options.column, options.label)
    return source, _file_view(spec, options, source), options


def _file_view(spec: Spec, options: DataOptions, source: Folder | Shards | Rows | StreamedRows) -> View:
    """Encoded images of any size: the central square of ImageNet's usual preparation."""
    size = options.size or 224
    view = View(scale=255, size=size, resize=round(size * 256 / 224), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    if options.size is None and options.shape is None and options.resize is None:
        sides = source.first_size()
        # A network for small images also runs on enlarged ones, and its statistics would describe those.
        if sides is not None and 2 * min(sides) <= size:
            wide, high = sides
            # Much of a long image, such as a line of text, would be cut off.
            own = f"{high}x{wide}" if max(sides) >= 2 * min(sides) else min(sides)
            logger.warning(
                "%s: images of %d×%d are enlarged to %d×%d; add ?size=%s to keep their size",
                *(spec, wide, high, size, size, own),
            )
    return view


def _open_npz(spec: Spec, options: DataOptions) -> tuple[Source, View, DataOptions]:
    source = open_npz(Path(spec.target).expanduser())
    return source, _array_view(source, options), options


def _open_cifar(spec: Spec, options: DataOptions) -> tuple[Source, View, DataOptions]:
    stored = "test" if options.split == "test" else "train"
    opener = open_cifar10 if spec.scheme == "cifar10" else open_cifar100
    source = opener(Path(spec.target).expanduser(), stored)
    # A separate test set needs no further split, unless a share of the training set is to be held out.
    split = options.split if options.split == "val" or options.holdout is not None else None
    if stored == "test":
        return source, _array_view(source, options), replace(options, split=None, holdout=None)
    return source, _array_view(source, options), replace(options, split=split)


def _open_digits(spec: Spec, options: DataOptions) -> tuple[Source, View, DataOptions]:
    holdout = options.holdout if options.holdout is not None or options.split is None else 0.2
    return open_digits(), View(scale=16, resize=options.size), replace(options, holdout=holdout)


def _array_view(source: Arrays, options: DataOptions) -> View:
    pixels = source.images.dtype == torch.uint8
    colour = pixels and source.images.shape[1] == 3
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if colour else (None, None)
    return View(scale=255 if pixels else 1, resize=options.size, mean=mean, std=std)


_OPENERS: dict[str, Callable[[Spec, DataOptions], tuple[Source, View, DataOptions]]] = {
    "imagefolder": _open_folder,
    "cifar10": _open_cifar,
    "cifar100": _open_cifar,
    "webdataset": _open_shards,
    "hf": _open_rows,
    "npz": _open_npz,
    "digits": _open_digits,
}
