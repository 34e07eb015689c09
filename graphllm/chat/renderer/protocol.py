"""Protocol between the rendering process and its client.

A reply is the length of its header, the length of its text, the header as JSON, and the text as
UTF-8; a request is one length and a header. Lengths are little-endian integers.

Request header: ``source``; to render, also ``messages``, ``tokens`` (texts of the template's
special tokens) and ``variables`` (of the caller). Without messages the template is compiled only.

Reply header: ``content``, the spans of the text that came from the caller, or ``error``, with
``syntax`` if the template does not compile; and ``last`` if the process ends after this reply.
"""

LENGTH_BYTES = 8
MAX_CPU_S = 1.0  # CPU time of a request
MAX_MEMORY_BYTES = 64 << 20  # beyond the memory of the process that holds the request
MAX_TEXT_BYTES = 16 << 20  # of a rendered chat
OUT_OF_MEMORY = 80  # exit status
