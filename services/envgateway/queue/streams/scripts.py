"""Lua scripts that Redis runs atomically for gateways and workers: many jobs in one command cost one reply.

Each is called with the client's ``eval``; a comment above each lists keys and arguments. None reads a clock or a random
number.
"""

from __future__ import annotations

# A gateway reports that the gateway lives, and adds jobs; jobs beyond the bound of Redis are all refused together.
#   keys: the gateway's mark, the streams of jobs by lane
#   arguments: the gateway, seconds that the mark lasts, then for each job the number of its stream among the keys, id, payload
#   returns whether the mark was there before, then the entry of each job
SEND = """
local reply = {redis.call('EXISTS', KEYS[1])}
for i = 3, #ARGV, 3 do
  reply[#reply + 1] = redis.call('XADD', KEYS[tonumber(ARGV[i])], '*',
    'id', ARGV[i + 1], 'gateway', ARGV[1], 'payload', ARGV[i + 2])
end
redis.call('SET', KEYS[1], 1, 'EX', ARGV[2])
return reply
"""

# A worker answers jobs: the answer is in its gateway's stream and the job is gone from its own, or neither.
#   keys: for each answer the stream of results and that of jobs
#   arguments: the group, seconds that a stream of results lasts, then for each answer the entry, id, payload
ANSWER = """
for i = 1, #KEYS, 2 do
  local entry = ARGV[3 * (i - 1) / 2 + 3]
  redis.call('XADD', KEYS[i], '*', 'id', ARGV[3 * (i - 1) / 2 + 4], 'payload', ARGV[3 * (i - 1) / 2 + 5])
  redis.call('EXPIRE', KEYS[i], ARGV[2])
  redis.call('XACK', KEYS[i + 1], ARGV[1], entry)
  redis.call('XDEL', KEYS[i + 1], entry)
end
"""

# Which of these entries are in the stream, without sending them back.
#   keys: the stream; arguments: entries; returns 1 or 0 for each
THERE = """
local there = {}
for i, id in ipairs(ARGV) do there[i] = #redis.call('XRANGE', KEYS[1], id, id) end
return there
"""
