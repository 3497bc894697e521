"""The description of the API: types of the responses, and the OpenAPI schema of a request."""

from typing import Any

from pydantic import BaseModel, Field

from flowrl.serving.wire_format import ErrorResponse, PromptMessage


class InfoResponse(BaseModel):
    """The served reward, and the limits of a request."""

    reward: str
    version: str = Field(description="of this API")
    max_batch: int = Field(description="Images in one call of the model")
    components: dict[str, float] | None = Field(
        None, description="Of a weighted sum: the weight of every component"
    )
    limits: dict[str, float]


class HealthResponse(BaseModel):
    """Whether the server scores requests."""

    status: str = Field(
        description="ok; or stuck: a call of the model takes longer than the limit; or stopped"
    )


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in (
        (400, "The body is not the multipart form described here, is cut off, or has two lengths"),
        (401, "The token is missing or wrong"),
        (403, "The request comes from a web page"),
        (408, "The body arrived too slowly"),
        (413, "Too many bytes, samples or pixels"),
        (415, "The body is not multipart/form-data"),
        (421, "The Host of the request is not this server"),
        (422, "Prompts or images cannot be read, or the reward refuses them"),
        (500, "The reward failed, or broke its contract"),
        (503, "Busy or stopping; retry later"),
        (504, "Scoring took too long"),
    )
}

_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["prompts"],
    "additionalProperties": False,
    "properties": {
        "prompts": {
            "type": "array",
            "items": PromptMessage.model_json_schema(),
            "description": "One prompt per image, as JSON",
        },
        "safetensors": {
            "type": "string",
            "format": "binary",
            "description": (
                "A safetensors file with one tensor, images [sample, channel, height, width]: "
                "float32, float16 or bfloat16 in [0, 1], or uint8 (value / 255)"
            ),
        },
        "png": {
            "type": "array",
            "items": {"type": "string", "format": "binary"},
            "description": "One 8-bit PNG per image, all of one size; instead of safetensors",
        },
        "reference": {
            "type": "array",
            "items": {"type": "string", "format": "binary"},
            "description": "An image file for every SHA-256 in the prompts' images",
        },
    },
}

SCORE_REQUEST: dict[str, Any] = {
    "parameters": [
        {
            "name": "parts",
            "in": "query",
            "required": False,
            "schema": {"type": "boolean", "default": False},
            "description": (
                "true: also send every component of a weighted sum; other rewards answer 422"
            ),
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": _FORM,
                "encoding": {
                    "prompts": {"contentType": "application/json"},
                    "png": {"contentType": "image/png"},
                },
            }
        },
    },
}
