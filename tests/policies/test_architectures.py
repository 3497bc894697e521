"""The published sizes: counted on shapes alone, without memory."""

import pytest

from flowrl.errors import ConfigError
from flowrl.policies.architectures import ARCHITECTURES, architecture
from flowrl.policies.lora import LORA_TARGETS, Adapters


@pytest.mark.parametrize(
    ("name", "billion", "layers"),
    [("sd3.5-medium", 2.47, 243), ("sd3.5-large", 8.1, 303), ("flux.1-dev", 11.9, 266), ("flux.1-schnell", 11.9, 266)],
)
def test_sizes_are_the_published_ones(name, billion, layers):
    """2.5, 8.1 and 12 billion, as the model cards say; with SD3's table of positions, which is not trained."""
    network = architecture(name).build()
    assert all(tensor.is_meta for tensor in network.parameters())
    numbers = sum(tensor.numel() for tensor in [*network.parameters(), *network.buffers()])
    assert numbers / 1e9 == pytest.approx(billion, rel=0.01)
    network.requires_grad_(False)
    adapters = Adapters(network, 32, 64.0, LORA_TARGETS, seed=0)
    assert len(adapters.layers) == layers
    expected = sum(32 * (layer.in_features + layer.out_features) for layer in adapters.layers)
    assert sum(p.numel() for p in adapters.parameters().values()) == expected


def test_an_embedding_has_the_families_shape():
    """77 CLIP tokens and 256 of T5 for SD3.5, 512 of T5 for FLUX; a latent has 16 channels."""
    from flowrl.policies.flux import Flux
    from flowrl.policies.sd3 import SD3

    for name, known in ARCHITECTURES.items():
        expected = 77 + SD3().text_tokens if name.startswith("sd3") else Flux().text_tokens
        patch = 1 if name.startswith("sd3") else 4
        assert (known.text_tokens, known.image_channels * patch) == (expected, known.config["in_channels"])


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"sd3\.5-medium, sd3\.5-large, flux\.1-dev"):
        architecture("sdxl")
