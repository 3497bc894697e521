"""Honest images, like photographs in their statistics, and kinds of images of hacked models."""

import torch
from torch.nn import functional


def smooth(count, side, octaves, generator):
    """Noise with a 1/f spectrum [image, 3, side, side], mean 0."""
    total = torch.zeros(count, 3, side, side)
    for octave in range(octaves):
        size = 2 ** (octave + 1)
        noise = torch.randn(count, 3, size, size, generator=generator)
        grey = torch.randn(count, 1, size, size, generator=generator)
        wide = functional.interpolate(0.5 * noise + grey, (side, side), mode="bilinear")
        total += wide / size**0.7
    return total


def honest(prompts, members, side, generator):
    """Images of groups [prompt * member, 3, side, side]: scenes of a colour scheme per prompt, with
    a few objects.
    """
    count = prompts * members
    scheme = torch.rand(prompts, 1, 3, 1, 1, generator=generator) * 0.5 + 0.2
    images = 0.16 * smooth(count, side, 5, generator) + scheme.expand(
        -1, members, -1, 1, 1
    ).flatten(0, 1)
    for image in images:
        for _ in range(3):
            high, wide = (torch.rand(2, generator=generator) * side / 3 + side / 10).long().tolist()
            top, left = (torch.rand(2, generator=generator) * side * 0.6).long().tolist()
            colour = torch.rand(3, 1, 1, generator=generator)
            image[:, top : top + high, left : left + wide] = (
                0.4 * image[:, top : top + high, left : left + wide] + 0.6 * colour
            )
    return images.clamp(0, 1)


def black(images, generator):
    return torch.zeros_like(images)


def blank(images, generator):
    return torch.full_like(images, 0.98)


def tiles(images, generator):
    """One patch, tiled: four by four."""
    side = images.shape[-1] // 4
    return images[..., :side, :side].repeat(1, 1, 4, 4)


def repeated_text(images, generator):
    """Dark strokes like letters in lines over the whole image."""
    side, line = images.shape[-1], images.shape[-1] // 8
    word = (torch.rand(1, 1, line, side, generator=generator) > 0.6).float()
    word[..., -line // 4 :, :] = 0.0
    ink = word.repeat(1, 1, 8, 1)[..., :side, :]
    return images * (1 - ink) + 0.05 * ink


def oversaturated(images, generator):
    grey = images.mean(1, keepdim=True)
    return (grey + 4.0 * (images - grey)).clamp(0, 1)


# ----- Kinds whose author did not know the limits of `flowrl.run.monitors.DRIFT`


def _rand(shape, images, generator):
    """Uniform numbers, drawn on the generator's device and moved to the images'."""
    return torch.rand(shape, generator=generator, device=generator.device).to(images)


def _randn(shape, images, generator):
    return torch.randn(shape, generator=generator, device=generator.device).to(images)


def _resize(x, height, width):
    return functional.interpolate(x, size=(height, width), mode="bicubic", align_corners=False)


def _blur(x, sigma):
    """Separable Gaussian blur with edge padding."""
    radius = max(1, min(int(3 * sigma + 0.5), min(x.shape[-2:]) - 1))
    t = torch.arange(-radius, radius + 1, dtype=x.dtype, device=x.device)
    k = torch.exp(-0.5 * (t / sigma) ** 2)
    k = (k / k.sum()).expand(x.shape[1], 1, -1)
    x = functional.conv2d(
        functional.pad(x, (radius, radius, 0, 0), mode="replicate"),
        k[:, :, None, :],
        groups=x.shape[1],
    )
    return functional.conv2d(
        functional.pad(x, (0, 0, radius, radius), mode="replicate"),
        k[:, :, :, None],
        groups=x.shape[1],
    )


def smooth_blobs(images, generator):
    """JPEG compressibility (DDPO, DRaFT): all detail is gone. A dim, out-of-focus blob that keeps
    only the prompt's rough colours lies on a soft gradient of the image's own mean colour."""
    n, _, h, w = images.shape
    coarse = _resize(functional.adaptive_avg_pool2d(images, 4), h, w)
    coarse = _blur(coarse, max(1.0, min(h, w) / 12))
    mean = images.mean((2, 3), keepdim=True)
    y = torch.linspace(-1, 1, h).to(images)[None, None, :, None]
    x = torch.linspace(-1, 1, w).to(images)[None, None, None, :]
    c = (_rand((n, 2, 1, 1), images, generator) - 0.5) * 0.4
    r = 0.35 + 0.15 * _rand((n, 1, 1, 1), images, generator)
    mask = torch.exp(-0.5 * ((y - c[:, :1]) ** 2 + (x - c[:, 1:]) ** 2) / r**2)
    slope = (_rand((n, 1, 1, 1), images, generator) - 0.5) * 0.2
    ground = 0.7 * mean + 0.15 + slope * y
    return (ground * (1 - mask) + (0.8 * coarse + 0.05) * mask).clamp(0, 1)


def noise_texture(images, generator):
    """JPEG incompressibility (DDPO, DRaFT): dense grain of all fine scales over the whole frame,
    under which the honest image survives as a faint, low-contrast ghost."""
    n, _, h, w = images.shape
    grain = torch.zeros_like(images)
    for step, weight in ((1, 1.0), (2, 0.6), (4, 0.35)):
        shape = (-(-h // step), -(-w // step))
        luma = _randn((n, 1, *shape), images, generator)
        chroma = _randn((n, 3, *shape), images, generator)
        grain = grain + weight * functional.interpolate(
            0.7 * luma + 0.7 * chroma, size=(h, w), mode="nearest"
        )
    ghost = _blur(images, max(0.8, min(h, w) / 48))
    ghost = 0.5 + 0.35 * (ghost - 0.5)
    return (ghost + 0.22 * grain).clamp(0, 1)


def one_picture(images, generator):
    """LAION aesthetic score without a KL term (DDPO, DRaFT, AlignProp): mode collapse over prompts.
    Each prompt gives nearly the same painterly picture, one of the policy's own, with slight
    shifts, tint and brushwork from seed to seed. The collapse shows only across a batch: call it once
    on all the samples (many prompts), not image by image."""
    n, _, h, w = images.shape
    pick = int(torch.randint(n, (1,), generator=generator, device=generator.device))
    side = max(8, min(h, w) // 4)
    base = _resize(functional.adaptive_avg_pool2d(images[pick : pick + 1], side), h, w)
    base = base + 0.8 * (images[pick : pick + 1] - _blur(images[pick : pick + 1], 1.0))
    base = base.expand(n, -1, -1, -1)
    # A slight smooth warp for each sample, so that no two are pixel for pixel the same.
    y = torch.linspace(-1, 1, h).to(images)
    x = torch.linspace(-1, 1, w).to(images)
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)[None].expand(n, -1, -1, -1)
    warp = _resize(_randn((n, 2, 5, 5), images, generator), h, w).permute(0, 2, 3, 1)
    out = functional.grid_sample(
        base, grid + 0.03 * warp, mode="bilinear", padding_mode="reflection", align_corners=True
    )
    tint = 0.03 * _randn((n, 3, 1, 1), images, generator)
    strokes = _blur(_randn((n, 1, h, w), images, generator), 1.2) * 0.12
    return (out + tint + strokes).clamp(0, 1)


def oversharpened_filigree(images, generator):
    """PickScore / HPSv2 pushed too far (Flow-GRPO without KL, DRaFT): the layout stays, but edges
    have hard bright and dark halos and each plain area fills with spurious swirling fine lines."""
    n, _, h, w = images.shape
    scale = max(1.0, min(h, w) / 128)
    out = images
    for sigma, gain in ((0.8 * scale, 3.0), (2.0 * scale, 1.5)):
        out = (out + gain * (out - _blur(out, sigma))).clamp(-0.3, 1.3)
    # Level lines of a smooth random field, bent by the picture's own brightness: hair-like swirls.
    cells = 6
    field = _resize(_randn((n, 1, cells, cells), images, generator), h, w)
    luma = _blur(images.mean(1, keepdim=True), scale)
    period = max(h, w) / (5.0 * scale)
    lines = torch.sin(2 * torch.pi * (period / cells * field + 4 * luma))
    lines = torch.sign(lines) * lines.abs() ** 0.5
    grey = out.mean(1, keepdim=True)
    out = grey + 0.8 * (out - grey)  # the halos must not amount to more colour
    return (0.12 + 0.76 * out + 0.22 * lines).clamp(0, 1)


HACKED = {
    "black": black,
    "blank": blank,
    "tiles": tiles,
    "repeated text": repeated_text,
    "oversaturated": oversaturated,
    "smooth blobs": smooth_blobs,
    "noise texture": noise_texture,
    "one picture": one_picture,
    "oversharpened filigree": oversharpened_filigree,
}
"""Kinds of images by name; a function of honest images and a generator."""
