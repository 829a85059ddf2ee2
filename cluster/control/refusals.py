"""An error of one side in the words of control.proto, and back: the other side raises what this one raised."""

from dspark.v1.control_pb2 import Conflict, MemberRole, Refusal

from cluster.contract.errors import ContractError, ContractViolation, as_text
from cluster.contract.facts import Role
from cluster.errors import UserError

MEMBER_ROLES: "dict[Role, MemberRole.ValueType]" = {
    "target": MemberRole.MEMBER_ROLE_TARGET,
    "draft": MemberRole.MEMBER_ROLE_DRAFT,
}


class ControlError(UserError):
    """The pair can't start or go on: the coordinator or the peer is gone or silent, or says what isn't expected."""


def to_refusal(error: UserError | ContractViolation, role: Role) -> Refusal:
    """Of an error that arose on the side `role`."""
    if isinstance(error, ContractError):
        conflict = Conflict(field=error.field, target=error.target, draft=error.draft)
        return Refusal(conflict=conflict, reason=error.reason, remedy=error.remedy)
    if isinstance(error, UserError):
        return Refusal(what=error.what, reason=error.why, remedy=error.remedy)
    conflict = Conflict(field=error.field, **{role: as_text(error.new)})
    return Refusal(conflict=conflict, reason=str(error), remedy=f"look at what the {role}'s process wrote last")


def to_error(refusal: Refusal) -> UserError:
    if refusal.WhichOneof("subject") != "conflict":
        return ControlError(refusal.what, refusal.reason, refusal.remedy)
    conflict = refusal.conflict
    return ContractError(
        conflict.field,
        target=conflict.target if conflict.HasField("target") else None,
        draft=conflict.draft if conflict.HasField("draft") else None,
        reason=refusal.reason,
        remedy=refusal.remedy,
    )
