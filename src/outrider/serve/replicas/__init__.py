"""Several servers behind one port: `outrider serve --replicas N`.

client ── app (routes, guard) ── relay (retries, `replay`) ── router (`routing`: prefixes, load) ── replicas
"""
