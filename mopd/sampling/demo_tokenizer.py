"""A small tokenizer for small models: byte-level BPE trained on given texts, with a short chat template."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# one word, digit or punctuation with the space before it: a name is the same tokens wherever it stands
PHRASES = r"[^\n.,:;()\[\]0-9]+|[0-9]|[\n.,:;()\[\]]+ ?"
# runs up to punctuation: merges may cross spaces, so that what a template always says becomes few tokens (a quarter
# fewer on the demo's texts), but a name's tokens depend on the words around it


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 1024, *, pattern: str = WORDS, min_frequency: int = 2
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `vocab_size` tokens, all 256 bytes among them, so that any text can be written.

    `pattern` is the pre-tokenisation: merges never cross its pieces (WORDS or PHRASES, or a regular expression). The
    result has pad and eos tokens and a chat template of one token per role and one per end; it saves and loads like
    any Hugging Face tokenizer. Same texts in the same order give the same tokenizer. Raises ValueError when the
    vocabulary cannot hold the bytes and the special tokens.
    """
    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size {vocab_size} is below {smallest}, the bytes and the special tokens alone")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=10**9,
    )
