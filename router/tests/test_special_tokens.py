"""The named special tokens that a chat template may write, as ``tokenizer_config.json`` has them."""

from sluice_router.text.chat_template import read_special_tokens


def test_only_texts_of_named_tokens_are_read():
    assert read_special_tokens(
        {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "pad_token": None,
            "unk_token": {"lstrip": True},
            "add_bos_token": True,
            "model_max_length": 4096,
            "chat_template": "{{ messages }}",
            "tokenizer_class": "Fast",
            "bos_token_id": "1",
            "token_extra": {"content": "x"},
        }
    ) == {"bos_token": "<s>", "eos_token": "</s>"}
