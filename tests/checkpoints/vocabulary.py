"""The tiny checkpoints' tokenizer: byte-level BPE, 512 tokens, so that any text encodes."""

from itertools import islice, product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
PAD_ID, _, EOS_ID, MASK_ID = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Byte-level BPE writes a space as this letter, so a merge may begin with one.
_SPACE = "Ġ"
_FREQUENT = _SPACE + "etaoinshrdlcumwf"


def printable_ids() -> list[int]:
    """Ids of the tokens that are printable ASCII, in order: text made of them reads the same in any chunking."""
    printable = {chr(code) for code in range(ord("!"), ord("~") + 1)} | {_SPACE}
    return [index for token, index in _vocabulary().items() if set(token) <= printable and index >= len(SPECIAL_TOKENS)]


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template to `folder`."""
    bpe = models.BPE(vocab=_vocabulary(), merges=_merges())
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)


def _vocabulary() -> dict[str, int]:
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _merges())]
    return {token: index for index, token in enumerate(tokens)}


def _merges() -> list[tuple[str, str]]:
    """As many pairs of frequent characters as fill the vocabulary."""
    pairs = product(_FREQUENT, _FREQUENT[1:])
    return list(islice(pairs, VOCAB_SIZE - len(SPECIAL_TOKENS) - len(pre_tokenizers.ByteLevel.alphabet())))
