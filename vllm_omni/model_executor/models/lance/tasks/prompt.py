# SPDX-License-Identifier: Apache-2.0
"""Convert a task and the user's text to segments, using the chat template, the system prompts and
the tokenizer.

    <|im_start|>system\\n SYSTEM <|im_end|>\\n<|im_start|>user\\n [vision] [reference] USER
    <|im_end|>\\n <|im_start|>assistant\\n [noise | the answer]

The unconditional context uses the same template, but USER is omitted or replaced by a negative
prompt. `LanceOptions.convention` can select the prompts of another implementation. A user's text
never produces special tokens. This module is tested by
tests/model_executor/models/lance/test_lance_prompt.py and test_lance_choices.py, and against the
golden files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from vllm_omni.model_executor.models.lance.config import READING_TASKS, LanceOptions, Task
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import Grid, SequenceSegment

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
VISION_PAD = "<|video_pad|>"
"""Placeholder for one visual token of an image or video."""
SPECIAL_TOKENS = (IM_START, IM_END, VISION_START, VISION_END, VISION_PAD)

_DRAW_IMAGE = (
    "Describe the image by detailing the color, quantity, text, shape, size, texture, spatial "
    "relationships of the "
    "objects and background:"
)
_DRAW_VIDEO = (
    "Describe the video by detailing the color, quantity, visible text, shape, size, texture, "
    "spatial relationships "
    "and motion/camera movements of the objects and background:"
)
_EDIT = (
    "Describe the key features of the input {0} (color, shape, size, texture, objects, "
    "background), then explain how "
    "the user\u2019s text instruction should alter or modify the {0}. Generate a new {0} that "
    "meets the user\u2019s "
    "requirements while maintaining consistency with the original input where appropriate."
)
SYSTEM_PROMPTS: Mapping[Task, str] = {
    "t2i": _DRAW_IMAGE,
    "t2v": _DRAW_VIDEO,
    "i2v": _DRAW_VIDEO,
    "image_edit": _EDIT.format("image"),
    "video_edit": _EDIT.format("video"),
    "x2t_image": "Look at the image carefully and answer the question.",
    "x2t_video": "Watch the video carefully and answer the question.",
    "t2t": "Answer the question.",
}
CAPTION_PROMPT = (
    "Generate a detailed and accurate description of the {}, including all the key "
    "moments and visual details."
)

_TEXT_TO_Images: tuple[Task, ...] = ("t2i", "t2v")
_ORIGINAL = LanceOptions()

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class PromptTokens:
    """Functions that convert text to token ids."""

    encode_template: Encode
    """Function that encodes the chat template. Its result may contain special tokens."""
    encode_user: Encode
    """Function that encodes a user's text. Its result never contains special tokens."""


@dataclass(frozen=True)
class ConversationMessage:
    """An earlier message in the conversation, before the prompt."""

    role: Literal["user", "assistant"]
    """Author of the message."""
    text: str
    """Text of the message."""


@dataclass(frozen=True)
class PromptSegments:
    """Sequences of segments for one request. If there is a noise block, it is the last segment of
    each sequence.
    """

    cond: tuple[SequenceSegment, ...]
    """Conditional sequence, with all segments."""
    uncond: tuple[SequenceSegment, ...]
    """Sequence without the user's text. Empty for understanding requests."""
    unseen: tuple[SequenceSegment, ...] = ()
    """Sequence without the image or video. Empty for understanding requests."""


def system_prompt_of(task: Task, served: LanceOptions) -> str:
    """Return a task's default system prompt. In the system prompts for edits, the apostrophe
    depends on `served`.
    """
    prompt = SYSTEM_PROMPTS[task]
    return (
        prompt if served.choices.edit_apostrophe == "typographic" else prompt.replace("\u2019", "'")
    )


def build_prompt(
    task: Task,
    tokens: PromptTokens,
    user_text: str,
    *,
    system_prompt: str | None = None,
    negative_prompt: str | None = None,
    vit: Grid | None = None,
    reference: Grid | None = None,
    noise: Grid | None = None,
    served: LanceOptions = _ORIGINAL,
    messages: Sequence[ConversationMessage] = (),
    image_message: int | None = None,
) -> PromptSegments:
    """Return a request's segments. Grids are (T, h, w) in decoder tokens.

    Args:
        task: Task of the request.
        tokens: Functions that convert text to token ids.
        user_text: The user's text.
        system_prompt: System prompt. Default: the task's system prompt.
        negative_prompt: User text in the unconditional context. Default: no text.
        vit: Grid of the image or video in the vision tower, or None.
        reference: Grid of the reference's latents, or None.
        noise: Grid of the latents to generate, or None.
        messages: Earlier messages of the conversation.
        image_message: Index of the message that contains the image or video. Default: it belongs to
            `user_text`.
    """
    system = system_prompt_of(task, served) if system_prompt is None else system_prompt
    encode = tokens.encode_template
    from_text = task in _TEXT_TO_Images
    wrapped = from_text and served.choices.drawing_prompt == "wrapped"
    opening = (
        *encode(f"{IM_START * wrapped}{IM_START}system\n"),
        *(encode if system_prompt is None else tokens.encode_user)(system),
    )
    if messages:
        said = [*messages, ConversationMessage("user", user_text)]
        return _conversation(
            opening, said, tokens, vit, len(messages) if image_message is None else image_message
        )
    prefix = _text((*opening, *encode(f"{IM_END}\n{IM_START}user\n")))
    context = [prefix]
    if vit is not None:
        context.append(SequenceSegment("vit", grid=vit))
    if reference is not None:
        context.append(SequenceSegment("reference", grid=reference))
    user = _text(tokens.encode_user(user_text), user=True)
    separator = _text(encode(f"{IM_END}\n{IM_START}assistant\n{IM_END * wrapped}"))
    block = [] if noise is None else [SequenceSegment("noise", grid=noise)]
    if task in READING_TASKS:
        joined = _text((*user.ids, *separator.ids))
        return PromptSegments((*context, joined), ())
    negative = (
        [] if not negative_prompt else [_text(tokens.encode_user(negative_prompt), user=True)]
    )
    uncond = [*context, *negative, separator]
    if from_text and served.choices.uncond_context == "empty":
        bare = task == "t2i" and not negative
        uncond = [] if bare else [_text(encode(IM_START)), *negative, _text(encode(IM_END))]
    unseen = (prefix, user, separator, *block)
    return PromptSegments((*context, user, separator, *block), (*uncond, *block), unseen)


def _conversation(
    first: Sequence[int],
    messages: Sequence[ConversationMessage],
    tokens: PromptTokens,
    vit: Grid | None,
    image_message: int,
) -> PromptSegments:
    """Return the segments for several messages. Each message is formatted with the chat template,
    and an image precedes the text of its message.
    """
    segments, ids = [], list(first)
    for number, turn in enumerate(messages):
        ids += tokens.encode_template(f"{IM_END}\n{IM_START}{turn.role}\n")
        if vit is not None and number == image_message:
            segments += [_text(ids), SequenceSegment("vit", grid=vit)]
            ids = []
        ids += tokens.encode_user(turn.text)
    ids += tokens.encode_template(f"{IM_END}\n{IM_START}assistant\n")
    return PromptSegments((*segments, _text(ids)), ())


def _text(ids: Sequence[int], user: bool = False) -> SequenceSegment:
    return SequenceSegment("text", ids=tuple(ids), user=user)


class LanceTokenizer:
    """A checkpoint's tokenizer. `tokenizer.json` is read directly, because the image checkpoint
    contains no `tokenizer_config.json`.
    """

    def __init__(self, path: Path, special: Mapping[str, int], vocab_size: int) -> None:
        try:
            self._template, self._user = (
                Tokenizer.from_file(str(path)),
                Tokenizer.from_file(str(path)),
            )
        except Exception as error:  # the library raises `Exception` itself for invalid files
            raise ValueError(f"{path} cannot be read as a tokenizer; download it again") from error
        # Names of special tokens in a user's text are encoded as plain text.
        self._user.encode_special_tokens = True
        self.ids: dict[str, int] = {}
        for token in SPECIAL_TOKENS:
            found = self._template.token_to_id(token)
            if found is None:
                raise ValueError(
                    f"{path} lacks the special token {token}; it is not this model's tokenizer"
                )
            if special.get(token, found) != found:
                raise ValueError(
                    f"{path} gives {token} the id {found}, llm_config.json says {special[token]}"
                )
            self.ids[token] = found
        self.size: int = self._template.get_vocab_size(with_added_tokens=True)
        if self.size > vocab_size:
            raise ValueError(f"{path} has {self.size} tokens, the decoder only {vocab_size} rows")

    @property
    def tokens(self) -> PromptTokens:
        return PromptTokens(
            lambda text: self._template.encode(text, add_special_tokens=False).ids,
            lambda text: self._user.encode(text, add_special_tokens=False).ids,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated token ids. Special tokens are omitted."""
        text: str = self._template.decode(list(ids), skip_special_tokens=True)
        return text
