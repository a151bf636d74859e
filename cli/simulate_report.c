/* quadrille simulate --report: a simulated step as an HTML page. */
#include "simulate.h"

#include <quadrille/report.h>

qd_status simulate_write_report(const qd_simulation *simulation, const char *path)
{
    qd_simulation_view *view = NULL;
    QD_TRY(qd_simulation_describe(simulation, true, &view));
    qd_status status = qd_report_write(qd_simulation_view_report(view), path);
    qd_simulation_view_destroy(view);
    return status;
}
