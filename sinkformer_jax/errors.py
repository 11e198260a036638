"""What a user can mend. Launchers print these in one line and exit with 1."""


class UserError(Exception):
  """The message names what is wrong, its value, and what to do."""


class ConfigError(UserError):
  """A config field that cannot be used."""


class DataError(UserError):
  """Data that is missing, damaged, or not what it should be."""


class RunError(UserError):
  """A run directory that cannot be used, or a training that went wrong."""
