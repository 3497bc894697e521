"""What travels: the answers of a reward server as typed models, and the OpenAPI description of a request."""

from typing import Any

from pydantic import BaseModel, Field

from flowrl.serving.payload import PromptPayload


class ScoreAnswer(BaseModel):
    """One finite number per picture, in the order of the request, or a mark that the reward cannot judge it."""

    request: str = Field(description="The request's X-Request-Id, or one made up by the server")
    scores: list[float | None] = Field(
        description="One finite number per picture, in the order of the request; higher is better. null where invalid is true"
    )
    invalid: list[bool] = Field(
        description="Per picture, whether the reward marked it as one that cannot be judged. Rewards that mark nothing: all false"
    )
    parts: dict[str, list[float | None]] | None = Field(
        None, description="With ?parts=true: every component's own scores; null only where invalid is true"
    )
    weights: dict[str, float] | None = Field(
        None, description="With ?parts=true: each component's weight; scores are the weighted sum of parts"
    )


class Problem(BaseModel):
    """Why there are no scores."""

    code: str = Field(description="A word for programs, such as too_many_samples")
    message: str = Field(description="A sentence for people")
    retry: bool = Field(description="Whether the same request may succeed later")


class ProblemAnswer(BaseModel):
    """The body of every answer that is an error."""

    error: Problem


class InfoAnswer(BaseModel):
    """What is served, and what a request may hold."""

    reward: str
    version: str = Field(description="of this API")
    max_batch: int = Field(description="Pictures in one call of the model")
    components: dict[str, float] | None = Field(None, description="Of a weighted sum: the weight of every component")
    limits: dict[str, float]


class HealthAnswer(BaseModel):
    """Whether requests are being scored."""

    status: str = Field(description="ok; or stuck: a call of the model takes longer than the limit; or stopped")


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ProblemAnswer, "description": "The body is not the multipart form described here, or is cut off"},
    401: {"model": ProblemAnswer, "description": "The token is missing or wrong"},
    408: {"model": ProblemAnswer, "description": "The body came too slowly"},
    413: {"model": ProblemAnswer, "description": "Too many bytes, samples or pixels"},
    415: {"model": ProblemAnswer, "description": "The body is not multipart/form-data"},
    421: {"model": ProblemAnswer, "description": "The request's Host is not this server"},
    422: {"model": ProblemAnswer, "description": "Prompts or pictures cannot be read, or the reward refuses them"},
    500: {"model": ProblemAnswer, "description": "The reward failed, or broke its contract"},
    503: {"model": ProblemAnswer, "description": "Busy or stopping; come back later"},
    504: {"model": ProblemAnswer, "description": "Scoring took too long"},
}

SCORE_BODY: dict[str, Any] = {
    "parameters": [
        {
            "name": "parts",
            "in": "query",
            "required": False,
            "schema": {"type": "boolean", "default": False},
            "description": "true: send every component of a weighted sum, too; other rewards answer 422",
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["prompts"],
                    "additionalProperties": False,
                    "properties": {
                        "prompts": {
                            "type": "array",
                            "items": PromptPayload.model_json_schema(),
                            "description": "One prompt per picture, as JSON",
                        },
                        "safetensors": {
                            "type": "string",
                            "format": "binary",
                            "description": "A safetensors file with one tensor, images [sample, channel, height, width]: "
                            "float32, float16 or bfloat16 in [0, 1], or uint8 (value / 255)",
                        },
                        "png": {
                            "type": "array",
                            "items": {"type": "string", "format": "binary"},
                            "description": "One 8-bit PNG per picture, all of one size; instead of safetensors",
                        },
                    },
                },
                "encoding": {"prompts": {"contentType": "application/json"}, "png": {"contentType": "image/png"}},
            }
        },
    },
}
