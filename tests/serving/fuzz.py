"""Random requests made from the protocol's descriptors: every field, extreme values, enum numbers nobody knows."""

import random
import string
from typing import Any, Final

from dspark.v1 import generation_pb2 as pb
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_DOUBLES: Final = (0.0, -0.0, 0.5, 1.0, 2.0, -2.0, 0.01, 100.0, -100.0, 1e300, 5e-324, float("nan"), float("inf"))
_COUNTS: Final = (0, 1, 2, 3, 16, 17, 63, 511, 512, 1024, 2**31 - 1, 2**31, 2**32 - 1)
_LARGE: Final = (0, 1, 2**31, 2**32, 2**63 - 17, 2**63 - 1, 2**63, 2**64 - 1)
_SIGNED: Final = (0, 1, -1, 2**31 - 1, -(2**31))
_TEXTS: Final = (
    "", " ", "a", "the", "\0", "\n", "é", "💥", "\u202e", "<|im_end|>", "<|mask|>", "{{ 7 * 7 }}", "%s%n", "x" * 300,
    "\\", '"', "a" * 5000,
)  # fmt: skip
_SCHEMAS: Final = (
    "{}", "[]", "3", "true", "{", '{"type":"object"}', '{"type":"integer","minimum":1e400}', '{"$ref":"#"}',
    '{"$ref":"#/nowhere"}', '{"type":"string","pattern":"(a+)+$"}', '{"enum":[]}', '{"const":null}',
    '{"type":"array","items":{"type":"integer"},"minItems":1000000}', '{"type":"nothing"}', '{"anyOf":[{},{}]}',
    '{"type":"string","maxLength":1000000000}', '{"properties":' * 40 + "{}" + "}" * 40, '{"minimum":NaN}',
    '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}', '{"type":"string","format":"email"}',
    '{"a":' + "9" * 5000 + "}",
)  # fmt: skip
_REGEXES: Final = (
    "", "a", "[0-9]{3}", "(a+)+b", "(", ")", "[", "*", "a{1000000}", "(?<=a)b", r"\1", r"(a)\1", ".*", "^$", r"\p{L}+",
    "(" * 500 + "a" + ")" * 500, "[\U0001f600-\U0001f64f]+", "a|" * 200, "(?i)a", r"\u0000",
)  # fmt: skip
_GRAMMARS: Final = (
    'root ::= "a"', 'root ::= root "a"', "root ::= ", "start: /a+/", 'start: "a" start', "nonsense", 'root ::= "a"*',
    "root ::= " + "(" * 300 + '"a"' + ")" * 300, 'root ::= other', 'root ::= "a"{1,1000000}', '::=', 'root ::= ""',
)  # fmt: skip
_POOLS: Final = {"json_schema": _SCHEMAS, "regex": _REGEXES, "grammar": _GRAMMARS}


class RequestFuzzer:
    """Two kinds, half and half: anything at all, and a right request of which little was changed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def request(self) -> pb.GenerateRequest:
        if self._random.random() < 0.5:
            message = self._right()
            for _ in range(self._random.choice((0, 1, 1, 2, 3))):
                self._change(message)
        else:
            message = pb.GenerateRequest()
            self._fill(message, share=self._random.choice((0.15, 0.4, 0.9)))
            if self._random.random() < 0.7:  # else few would be looked at any further
                message.request_id = ""
                message.token_ids.CopyFrom(pb.TokenIds(ids=[1, 2, 3]))
        if not self._random.randrange(20):
            return message
        # Else a request that is taken for right would often run to the end of the context.
        if not 0 < message.stopping.max_tokens < 2**16:
            message.stopping.max_tokens = self._random.randint(1, 3)
        return message

    def batch(self) -> pb.GenerateBatchRequest:
        return pb.GenerateBatchRequest(requests=[self.request() for _ in range(self._random.choice((0, 1, 2, 3)))])

    def abort(self) -> pb.AbortRequest:
        return pb.AbortRequest(request_ids=[self._text() for _ in range(self._random.choice((0, 1, 2, 1025)))])

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def _right(self) -> pb.GenerateRequest:
        roll = self._random
        message = pb.GenerateRequest(stopping=pb.StoppingConditions(max_tokens=roll.randint(1, 4)))
        if roll.random() < 0.7:
            message.token_ids.ids.extend(roll.randrange(512) for _ in range(roll.choice((1, 3, 40, 200))))
        else:
            message.text = "".join(roll.choices(string.ascii_lowercase + " ", k=roll.choice((1, 20, 200))))
        message.sampling.temperature = roll.choice((0.0, 0.01, 1.0, 2.0))
        return message

    def _change(self, message: Message) -> None:
        field = self._random.choice(message.DESCRIPTOR.fields)
        if field.message_type is not None and not field.is_repeated and self._random.random() < 0.8:
            inner = getattr(message, field.name)
            inner.SetInParent()
            if field.message_type.fields:
                self._change(inner)
            return
        self._set(message, field, share=0.5)

    def _fill(self, message: Message, *, share: float) -> None:
        message.SetInParent()
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < share:
                self._set(message, field, share=share)

    def _set(self, message: Message, field: FieldDescriptor, *, share: float) -> None:
        value = getattr(message, field.name)
        kind: Descriptor | None = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            for _ in range(self._count()):
                value[self._scalar(kind.fields_by_name["key"])] = self._scalar(kind.fields_by_name["value"])
        elif field.is_repeated and kind is not None:
            for _ in range(min(self._count(), 5)):
                self._fill(value.add(), share=share)
        elif field.is_repeated:
            value.extend(self._scalar(field) for _ in range(self._count()))
        elif kind is not None:
            self._fill(value, share=share)
        else:
            setattr(message, field.name, self._scalar(field))

    def _count(self) -> int:
        return self._random.choice((0, 1, 1, 2, 3, 17, 65, 129, 1025))

    def _scalar(self, field: FieldDescriptor) -> Any:
        roll = self._random
        match field.type:
            case FieldDescriptor.TYPE_DOUBLE:
                return roll.choice((*_DOUBLES, roll.uniform(-3, 3), roll.uniform(0, 1)))
            case FieldDescriptor.TYPE_BOOL:
                return roll.random() < 0.5
            case FieldDescriptor.TYPE_UINT32:
                return roll.choice((*_COUNTS, roll.randrange(512), roll.randrange(20)))
            case FieldDescriptor.TYPE_UINT64:
                return roll.choice((*_LARGE, roll.randrange(2**64)))
            case FieldDescriptor.TYPE_INT32:
                return roll.choice(_SIGNED)
            case FieldDescriptor.TYPE_ENUM:
                known = [each.number for each in field.enum_type.values]
                return roll.choice((*known, 99, -1, 2**31 - 1))
            case FieldDescriptor.TYPE_STRING:
                return roll.choice(_POOLS[field.name]) if field.name in _POOLS else self._text()
        raise NotImplementedError(f"no values for {field.full_name}")

    def _text(self) -> str:
        return self._random.choice((*_TEXTS, "".join(self._random.choices(string.printable, k=9))))
