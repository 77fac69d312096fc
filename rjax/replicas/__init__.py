"""Several replicas of the server's engine under Ray Serve, behind one address.

The process of ``rjax serve --replicas N`` has the HTTP server. Its `gateway` sends each request
to a replica through Ray; the replica runs the same app as a server alone. `prefix_router` chooses
the replica, `fleet` deploys, updates and ends them, `autoscaling` decides their number.
"""
