"""Chats: templates that turn messages into a prompt, and conversations that remember."""

from .builtin import TEMPLATES
from .conversation import Conversation
from .messages import Message, normalize_messages
from .process import PROCESS
from .prompt import Prompt, encode_chat
from .template import ChatTemplate, directory_template, find_template, template_tokens

__all__ = [
    "PROCESS",
    "TEMPLATES",
    "ChatTemplate",
    "Conversation",
    "Message",
    "Prompt",
    "directory_template",
    "encode_chat",
    "find_template",
    "normalize_messages",
    "template_tokens",
]
