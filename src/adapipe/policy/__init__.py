"""Which mode runs when: policies that see numbers only."""

from adapipe.policy.base import Decision, Mode, Policy
from adapipe.policy.director import Director, replay
from adapipe.policy.fixed import Fixed, Plan, parse_plan
from adapipe.policy.slope import Slope

__all__ = ["Decision", "Director", "Fixed", "Mode", "Plan", "Policy", "Slope", "parse_plan", "replay"]
