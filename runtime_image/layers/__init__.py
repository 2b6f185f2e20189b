"""Layers: directory trees in overlayfs form, and the blobs they travel as."""

from runtime_image.layers.cache import CachedLayer, LayerCache
from runtime_image.layers.changes import Changes, changes
from runtime_image.layers.copy import copy_tree, dress_implied, dress_root, flush
from runtime_image.layers.delta import Delta, delta
from runtime_image.layers.dirs import remove_tree
from runtime_image.layers.errors import (
    DigestMismatch,
    LayerError,
    LayerRefused,
    ParentMismatch,
    TreeChanged,
    TreeUnsupported,
)
from runtime_image.layers.globs import PathGlobs, Without
from runtime_image.layers.index import LayerIndex, index
from runtime_image.layers.lookup import has_directory
from runtime_image.layers.pack import PackedLayer, UnpackedLayer, pack, unpack
from runtime_image.layers.repack import repack
from runtime_image.layers.squash import squash

__all__ = [
    "CachedLayer",
    "Changes",
    "Delta",
    "DigestMismatch",
    "LayerCache",
    "LayerError",
    "LayerIndex",
    "LayerRefused",
    "PackedLayer",
    "ParentMismatch",
    "PathGlobs",
    "TreeChanged",
    "TreeUnsupported",
    "UnpackedLayer",
    "Without",
    "changes",
    "copy_tree",
    "delta",
    "dress_implied",
    "dress_root",
    "flush",
    "has_directory",
    "index",
    "pack",
    "remove_tree",
    "repack",
    "squash",
    "unpack",
]
