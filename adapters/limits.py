"""What one upload may cost, all in one place: bytes, members, ratio, time, and sizes of texts."""

from dataclasses import dataclass

# Of adapter_config.json; real ones have less than 100 KB.
MAX_CONFIG_BYTES = 1 << 20
# Of the header of a safetensors file; PEFT writes 100 bytes a tensor.
MAX_HEADER_BYTES = 16 << 20
# Of objects and lists in each other, in both.
MAX_JSON_DEPTH = 32
# Of entries in one list of a config, and in one pattern; a base of 100 layers has 700 modules.
MAX_CONFIG_NAMES = 8192
MAX_CONFIG_PATTERNS = 2048
# Of one regular expression, and of matching all of a config's with every module's name.
MAX_EXPRESSION_CHARS = 4096
MAX_MATCH_CPU_S = 1
# Of a form: its parts, a text among them, and the header lines before each.
MAX_FORM_FILES = 256
MAX_FORM_TEXTS = 16
MAX_FORM_TEXT_BYTES = 4096
MAX_FORM_HEADERS = 8
MAX_FORM_HEADER_BYTES = 4096
# Of one file's name in a form or an archive, and of the tar headers that belong to one file.
MAX_MEMBER_NAME_BYTES = 1024
MAX_TAR_TEXT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLimits:
    """What an upload may cost before it is refused; each refusal names its limit.

    max_total_bytes   of the files that are taken, and of all that is unpacked on the way
    max_members       files and folders in it, skipped ones too
    max_ratio         unpacked to packed bytes, asked only above ratio_free_bytes
    max_unpack_s      from the first look to the last byte
    """

    max_total_bytes: int = 2 << 30
    max_members: int = 20_000
    max_ratio: int = 100
    ratio_free_bytes: int = 64 << 20
    max_unpack_s: float = 120.0
