-- What the guest's kernel refused a command, or ended it for: a JSON list of names, absent where there was nothing.
ALTER TABLE commands ADD COLUMN limits_hit TEXT;
