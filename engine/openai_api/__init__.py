"""OpenAI's HTTP API from the server's side, for any model and any server.

`schema` reads requests and writes answers, without a server's state; `http_server` is a server
whose clients may be slow, greedy or gone.
"""
