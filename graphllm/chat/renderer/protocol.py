"""What the rendering process and its caller agree on.

A message is its header's length and its text's, the header as JSON, and the text as UTF-8; a
request has no text and one length. Requests: ``source``, and to render ``messages``, ``tokens``
(the template's own texts) and ``variables`` (the caller's). Answers: ``content``, the spans of
the text that came from the caller, or ``error``, and ``last`` when the process ends after it.
"""

LENGTH_BYTES = 8  # little-endian
MAX_CPU_S = 1.0  # of a request
MAX_MEMORY_BYTES = 64 << 20  # beyond those of the process with the request in it
MAX_TEXT_BYTES = 16 << 20  # of a rendered chat
OUT_OF_MEMORY = 80  # exit status
