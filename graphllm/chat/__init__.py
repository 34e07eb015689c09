"""Chat: templates that render messages as a prompt, and multi-turn conversations."""

from .builtin_templates import TEMPLATES
from .conversation import Conversation
from .messages import Message, normalize_messages
from .rendered_chat import RenderedChat, encode_chat
from .renderer_process import PROCESS
from .template import ChatTemplate, directory_template, find_template, template_tokens

__all__ = [
    "PROCESS",
    "TEMPLATES",
    "ChatTemplate",
    "Conversation",
    "Message",
    "RenderedChat",
    "directory_template",
    "encode_chat",
    "find_template",
    "normalize_messages",
    "template_tokens",
]
