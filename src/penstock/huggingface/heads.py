"""Heads that models of transformers have over their blocks, and the library's classes for them."""

from __future__ import annotations

from typing import Any

from penstock.base.errors import SplitError
from penstock.forward.frames import OWN_HEAD

CAUSAL, SEQUENCE, TOKEN = "CausalLM", "SequenceClassification", "TokenClassification"
IMAGES = "ImageTextToText"
MASKED, QUESTIONS, IMAGE_CLASSES = "MaskedLM", "QuestionAnswering", "ImageClassification"
HEADS = {
    CAUSAL: ("MODEL_FOR_CAUSAL_LM_MAPPING", "causal language model"),
    SEQUENCE: ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "model for sequence classification"),
    TOKEN: ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "model for token classification"),
    IMAGES: ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "model of images and text"),
    MASKED: ("MODEL_FOR_MASKED_LM_MAPPING", "masked language model"),
    QUESTIONS: ("MODEL_FOR_QUESTION_ANSWERING_MAPPING", "model for question answering"),
    IMAGE_CLASSES: ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "model for image classification"),
}
"""Heads that can be split, as names of classes end: the library's table of classes, and a name."""


def classes_of(config: Any, head: str) -> tuple[type, ...]:
    """Return the library's classes with a head for a config; none if there are none."""
    import transformers

    table = getattr(transformers, HEADS[head][0])
    if type(config) not in table:
        return ()
    found = table[type(config)]
    return found if isinstance(found, tuple) else (found,)


def head_in(config: Any) -> str:
    """Return the head that a config asks for by its ``architectures``; a causal language model's if it does not."""
    heads = [str(name).partition("For")[2] for name in getattr(config, "architectures", None) or ()]
    return next((head for head in heads if head in HEADS), CAUSAL)


def head_of(model: Any) -> str:
    """Return the head of a model.

    Raises:
        SplitError: if it has none that can be split, or a forward that is not the library's.
    """
    for head in HEADS:
        classes: tuple[Any, ...] = classes_of(model.config, head)
        if not isinstance(model, classes):
            continue
        if all(type(model).forward is not kind.forward for kind in classes):
            raise SplitError(
                f"{type(model).__name__} has a forward of its own, and only {classes[0].__name__}'s is proved, with "
                "its loss; use that class and give the Pipeline what yours does as loss_fn, or register yours with a config "
                f"of its own (AutoModelFor{head}.register)"
            )
        return head
    raise SplitError(
        f"a {type(model).__name__} is not a causal language model, nor any other that is split; "
        f"give what {', '.join(f'AutoModelFor{head}' for head in HEADS)} makes; {OWN_HEAD}"
    )


def empty_model(config: Any, head: str) -> Any:
    """Return the library's model with a head for a config, with new weights."""
    import transformers

    return getattr(transformers, f"AutoModelFor{head}").from_config(config)
