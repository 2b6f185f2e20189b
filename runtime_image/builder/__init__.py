"""Images: built from recipes, imported from others, composed of layers."""

from runtime_image.builder.build import build_layer, build_recipe, compose, copy_image
from runtime_image.builder.errors import BuildError, BuildReason
from runtime_image.builder.manifest import (
    ImageConfig,
    ImageLayer,
    ImageManifest,
    LayerRole,
    blob_name,
    layer_of,
)
from runtime_image.builder.oci import import_oci, import_tar
from runtime_image.builder.repack import repack_layers

__all__ = [
    "BuildError",
    "BuildReason",
    "ImageConfig",
    "ImageLayer",
    "ImageManifest",
    "LayerRole",
    "blob_name",
    "build_layer",
    "build_recipe",
    "compose",
    "copy_image",
    "import_oci",
    "import_tar",
    "layer_of",
    "repack_layers",
]
