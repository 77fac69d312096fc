"""Several replicas of the server's engine under Ray Serve, behind one address.

The process of ``rjax serve --replicas N`` has the port for clients. Ray starts the replicas and
watches over them; each is a server alone that only answers the `gateway`, which asks Ray for a
replica and then passes requests and responses on over HTTP. `prefix_router` chooses the replica,
`fleet` deploys, updates and ends them, `autoscaling` decides their number.
"""
