"""Brings the messages of a chat into the form that one chat template takes.

Clients send what OpenAI's API allows, and templates take less: some want turns that alternate, ids
of nine characters, or arguments as text. ``checked`` reads the messages, a ``Form`` says what the
template takes, and ``find_form`` finds that out when the model is loaded, by rendering small
conversations. What a template cannot place is moved, joined or filled in. ``is_lost`` says whether
a text is missing in a prompt; then, and when the template fails, ``fallbacks`` are tried.
"""

from asyncllm.text.template_form.calls import WriteCalls as WriteCalls
from asyncllm.text.template_form.calls import calls_as_json as calls_as_json
from asyncllm.text.template_form.calls import named_arguments as named_arguments
from asyncllm.text.template_form.calls import read_arguments as read_arguments
from asyncllm.text.template_form.form import Form as Form
from asyncllm.text.template_form.form import fallbacks as fallbacks
from asyncllm.text.template_form.messages import Message as Message
from asyncllm.text.template_form.messages import checked as checked
from asyncllm.text.template_form.messages import is_lost as is_lost
from asyncllm.text.template_form.search import find_form as find_form
