/* Tables of ways of local collectives that no machine would choose: each takes one way wherever
 * that is possible, also for messages for which it is never the fastest. */
#ifndef QD_TESTS_DIST_WAYS_H
#define QD_TESTS_DIST_WAYS_H

#define WAYS_NEVER "1099511627776"
static const char *const forced_ways[] = {
    "stream_from=0 stream_copy=page far_copy=page",
    "stream_from=0 stream_copy=pages far_copy=pages",
    "stream_from=0 stream_copy=lines far_copy=lines far_bytes=0",
    "stream_bytes=" WAYS_NEVER " common_from=" WAYS_NEVER,
    "pass_from=1 placed_from=1 common_from=0 send_placed_from=1 send_share_from=1",
    "rooted_from=1",
    "pass_from=" WAYS_NEVER " rooted_from=" WAYS_NEVER " placed_from=" WAYS_NEVER " send_placed_from=" WAYS_NEVER,
    "reach_from=1 reach_most=" WAYS_NEVER " send_reach_from=1 send_share_from=" WAYS_NEVER,
    ("reach_most=0 send_reach_from=" WAYS_NEVER),
};
enum { FORCED_WAYS = sizeof forced_ways / sizeof *forced_ways };

#endif
