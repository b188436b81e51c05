"""KV-cache layouts: which byte of a cache holds what. Nothing outside this folder knows an offset.

A token's **record** is all of its bytes in one piece (``records``). ``pack`` and ``unpack`` turn
real numbers into records and back; ``read`` and ``write`` move records out of and into a cache,
by slot (``paging``); ``gather_fp8`` makes what the operators take of a cache that they do not.

``FLAT_512`` and ``FLAT_576``: what the operators read. Its one scale is kept outside the cache.

      0                                  512             576
      | 512 x e4m3: latent                | 64 x e4m3: rope |     flat-576
      | 512 x e4m3: latent                |                       flat-512

``V32``: DeepSeek-V3.2 and GLM-5, 656 bytes. Scale k is that of latent columns 128 k to 128 k + 127.

      0                                  512             528                      656
      | 512 x e4m3: latent                | 4 x float32    | 64 x bfloat16: rope     |

``V4``: DeepSeek-V4, 584 bytes a token, which a page keeps in two parts: first 576 bytes of each of
its tokens, then 8 bytes of each. Scale k is a UE8M0 byte b, which means 2^(b - 127), and is that of
latent columns 64 k to 64 k + 63.

      0                             448                      576                583   584
      | 448 x e4m3: latent           | 64 x bfloat16: rope     | 7 x UE8M0: scales | pad |   record

      page of p tokens, at byte
      0          576                  576 p      576 p + 8             584 p        page stride
      | token 0   | ... | token p-1    | scales 0  | ... | scales p-1   | unused      |

A **cache** is a uint8 (or ``float8_e4m3fn``) tensor ``[pages, page_size, token_bytes]``. Slot s is
token ``s % page_size`` of page ``s // page_size``. Pages may lie any distance apart: ``stride(0)``
is honoured. Layouts whose records are in one piece may come as ``[slots, token_bytes]`` too.
Numbers are in the machine's byte order.

Real value = stored value * scale, in every layout. Source: the cache formats that FlashMLA's README
describes. Everything works on any torch device; shapes and dtypes that do not fit raise
``ValueError`` with the actual values.
"""

from __future__ import annotations

from .paging import empty_cache, gather_float, gather_fp8, page_slots, read, write
from .records import (
    FLAT_512,
    FLAT_576,
    LAYOUTS,
    V4,
    V32,
    Fields,
    Layout,
    join,
    pack,
    split,
    ue8m0_at_least,
    ue8m0_to_float,
    unpack,
)

__all__ = [
    "FLAT_512",
    "FLAT_576",
    "LAYOUTS",
    "V4",
    "V32",
    "Fields",
    "Layout",
    "empty_cache",
    "gather_float",
    "gather_fp8",
    "join",
    "pack",
    "page_slots",
    "read",
    "split",
    "ue8m0_at_least",
    "ue8m0_to_float",
    "unpack",
    "write",
]
