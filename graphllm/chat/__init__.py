"""Chats: templates that turn messages into a prompt, and conversations that remember."""

from .builtin import TEMPLATES
from .conversation import Conversation, encode_chat
from .template import ChatTemplate, Message, directory_template, find_template

__all__ = [
    "TEMPLATES",
    "ChatTemplate",
    "Conversation",
    "Message",
    "directory_template",
    "encode_chat",
    "find_template",
]
