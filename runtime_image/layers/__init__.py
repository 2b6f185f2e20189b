"""Layers: directory trees in overlayfs form, and the blobs they travel as."""

from runtime_image.layers.cache import CachedLayer, LayerCache
from runtime_image.layers.copy import copy_tree, flush
from runtime_image.layers.dirs import remove_tree
from runtime_image.layers.errors import (
    DigestMismatch,
    LayerError,
    LayerRefused,
    ParentMismatch,
    TreeChanged,
    TreeUnsupported,
)
from runtime_image.layers.pack import PackedLayer, UnpackedLayer, pack, unpack

__all__ = [
    "CachedLayer",
    "DigestMismatch",
    "LayerCache",
    "LayerError",
    "LayerRefused",
    "PackedLayer",
    "ParentMismatch",
    "TreeChanged",
    "TreeUnsupported",
    "UnpackedLayer",
    "copy_tree",
    "flush",
    "pack",
    "remove_tree",
    "unpack",
]
